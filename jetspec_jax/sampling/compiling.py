"""Compiles grammars with llguidance, in this process or first in a trial process.

llguidance's limits bound neither its time nor its memory nor its stack. A schema of 45 bytes can compile for
minutes, a regular expression can take gigabytes, and a chain of rules can crash the process. So a server
first compiles a client's grammar in a process that may die: this file, run as a program.
"""

import json
import signal
import sys
import threading
import time
from copy import copy
from pathlib import Path
from typing import Any

# Tokens of a text that a trial decodes, because llguidance computes masks lazily.
_STEPS = 32
# Beginnings of texts that a trial tries to end, most tokens tried after each, and characters tried first.
_BEGINNINGS, _BRANCHES, _CLOSERS = 256, 8, '"}],:'
# Share of a trial's time limit in which it looks for them.
_SHARE = 0.25
# Characters of a beginning that are quoted.
_QUOTED = 60
# Bytes of a trial's stack: half of a thread's usual stack, so that accepted grammars also fit the engine's.
_STACK = 2**22


def serialized(tokenizer: Any, size: int, ends: list[int]) -> str:
    """A vocabulary as one line of JSON, the input of `load_tokens`.

    Without ``ends`` the tokenizer's EOS token ends a sequence.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise ValueError("only tokenizers in their fast form are supported")
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    ends = ends or tokenizer.eos_token_id
    return json.dumps({"tokenizer": backend.to_str(), "n_vocab": size, "eos_token": ends})


def load_tokens(text: str) -> Any:
    """Loads the output of `serialized` into llguidance; raises ValueError if it is not supported."""
    from llguidance import LLTokenizer

    return LLTokenizer(**json.loads(text))


def compiled(tokens: Any, kind: str, text: str, *, flexible: bool) -> tuple[Any, bytes]:
    """Compiles a grammar; returns a matcher at its start, and the packed set of the possible first tokens.

    ``kind`` is a field of `StructuredOutputsParams`; ``flexible`` JSON may have whitespace between its parts.
    """
    from llguidance import LLMatcher, LLParserLimits, grammar_from

    try:
        if kind in ("json", "json_object"):
            grammar = LLMatcher.grammar_from_json_schema(text, {"whitespace_flexible": flexible})
        elif kind == "grammar":
            grammar = LLMatcher.grammar_from_lark(_lark(text))
        else:
            grammar = grammar_from(kind, text)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        raise ValueError(f"structured_outputs: {kind} does not compile: {words(error)}") from error
    start = LLMatcher(tokens, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if start.is_error():
        raise ValueError(f"structured_outputs: {kind} does not compile: {words(start.get_error())}")
    first = start.compute_bitmask()
    if start.is_error():
        reason = words(start.get_error())
        raise ValueError(f"structured_outputs: {kind} admits no text of the target's tokens: {reason}")
    return start, first


def _lark(text: str) -> str:
    """A grammar in Lark form, converted from GBNF if needed.

    llguidance's test of the form uses a regular expression whose time grows with the square of the number of
    empty lines, with the GIL held.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    begins = (line.lstrip() for line in text.splitlines())
    if any(line.startswith("%llguidance") or line.partition(":")[0].rstrip() == "start" for line in begins):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises errors of many types
        raise ValueError(f"neither Lark nor GBNF: {error}") from error


def words(error: object) -> str:
    """The message of an llguidance error in one line, without the state that it appends."""
    message = str(error).partition("\n<state>")[0].partition("\n<non-verbose/>")[0]
    return " ".join(message.split())


class Trials:
    """The program of this file: reads a line with a vocabulary, then one line per grammar.

    For each grammar it writes a line: null, or the reason for refusing it. If a grammar exceeds a limit, the
    process ends without an answer.
    """

    def __init__(self, seconds: float, most_bytes: int):
        """Reads the vocabulary, and limits processor time for each grammar and further memory for all."""
        import resource  # only on Unix

        self._tokens, self._seconds = load_tokens(sys.stdin.readline()), seconds
        each = (self._tokens.greedy_tokenize(sign) for sign in _CLOSERS)
        self._closers = [tokens[0] for tokens in each if len(tokens) == 1]
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        statistics = Path("/proc/self/statm")
        if statistics.exists():  # on other systems memory is not limited
            now = int(statistics.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + most_bytes, now + most_bytes))

    def run(self) -> None:
        """Answers lines until standard input ends."""
        for line in sys.stdin:
            # The signal has no handler, so it ends the process in any state.
            signal.setitimer(signal.ITIMER_PROF, self._seconds)
            answer = self._answer(**json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(answer), flush=True)

    def _answer(self, **grammar: Any) -> str | None:
        until = time.process_time() + self._seconds * _SHARE
        try:
            start, mask = compiled(self._tokens, **grammar)
            matcher = start.deep_copy()
            if grammar["kind"] == "json" and grammar["flexible"] and time.process_time() < until:
                # Endless whitespace would hide a dead end.
                start, _ = compiled(self._tokens, "json", grammar["text"], flexible=False)
        except ValueError as error:
            return str(error)
        for step in range(_STEPS):
            token = self._token(mask, 7919 * step)
            if token is None or not matcher.consume_token(token):
                break
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                break
        if (dead_end := self._dead_end(start, until)) is None:
            return None
        return f"structured_outputs: {grammar['kind']} allows no text that ends: {dead_end}"

    def _dead_end(self, start: Any, until: float) -> str | None:
        """A beginning after which nothing may follow, if a search finds such beginnings and no whole text."""
        found, left = None, [(start, [])]
        for step in range(_BEGINNINGS):
            if time.process_time() > until:
                return None
            if not left:
                break
            # The shortest beginning and the longest one by turns: either may be the closest to an end.
            before, tokens = left.pop(-(step % 2))
            matcher = before.deep_copy()
            matcher.consume_tokens(tokens[-1:])
            while not matcher.is_error() and (forced := matcher.compute_ff_tokens()):
                matcher.consume_tokens(forced)
                tokens = [*tokens, *forced]
            mask = matcher.compute_bitmask()
            if not matcher.is_error() and matcher.is_accepting():
                return None
            follow = [] if matcher.is_error() else self._follow(mask)
            if not follow and found is None:
                reason = f": {words(matcher.get_error())}" if matcher.is_error() else ""
                found = f"nothing may follow {self._tokens.decode_str(tokens)[-_QUOTED:]!r}{reason}"
            left += [(matcher, [*tokens, token]) for token in reversed(follow)]
        return found

    def _follow(self, mask: bytes) -> list[int]:
        """Some of the text tokens in a packed set: those that end values, then the first ones."""
        bits = int.from_bytes(mask, "little") & ~sum(1 << end for end in self._tokens.eos_tokens)
        tokens = [token for token in self._closers if bits >> token & 1]
        for _ in range(_BRANCHES):
            bits &= ~sum(1 << token for token in tokens)
            if bits:
                tokens.append((bits & -bits).bit_length() - 1)
        return tokens

    def _token(self, mask: bytes, start: int) -> int | None:
        """The first text token of a packed set from byte ``start`` on, cyclically; None if there is none."""
        text = bytearray(mask)
        for end in self._tokens.eos_tokens:
            text[end // 8] &= ~(1 << end % 8)
        start %= len(text)
        for begin, part in ((start, text[start:]), (0, text)):
            if found := part.lstrip(b"\0"):
                return 8 * (begin + len(part) - len(found)) + (found[0] & -found[0]).bit_length() - 1
        return None


def _main(seconds: str, most_bytes: str) -> None:
    # A thread's stack has a defined size, unlike the main thread's.
    threading.stack_size(_STACK)
    thread = threading.Thread(target=lambda: Trials(float(seconds), int(most_bytes)).run())
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
