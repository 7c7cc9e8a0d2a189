"""Grammars compiled by llguidance: in this process, or first on trial in a process of its own.

llguidance has limits, but they bound neither its time nor its memory nor its stack. A schema of 45 bytes
compiles for minutes, a regular expression takes gigabytes, and a chain of rules ends the process. So a server
compiles what a client sends in a process that may die: this file, run as a program, which imports llguidance.
"""

import json
import signal
import sys
import threading
from copy import copy
from pathlib import Path
from typing import Any

# Tokens of a text that a trial follows, as masks are computed when they are asked for.
_STEPS = 32
# Bytes of the stack: half of what threads usually have, so that the engine's suffice for what passes.
_STACK = 2**22


def serialized(tokenizer: Any, size: int, ends: list[int]) -> str:
    """What `load_tokens` makes a vocabulary of, as one line.

    Args:
        tokenizer: A transformers tokenizer in its fast form.
        size: Tokens of the vocabulary.
        ends: Tokens that end a sequence; without any it is the tokenizer's own.

    Raises:
        ValueError: The tokenizer has another form.
    """
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise ValueError("only tokenizers in their fast form are supported")
    backend = copy(backend)
    backend.no_padding()
    backend.no_truncation()
    ends = ends or tokenizer.eos_token_id
    return json.dumps({"tokenizer": backend.to_str(), "n_vocab": size, "eos_token": ends})


def load_tokens(text: str) -> Any:
    """The vocabulary that `serialized` wrote, for llguidance; raises ValueError where it cannot take that."""
    from llguidance import LLTokenizer

    return LLTokenizer(**json.loads(text))


def compiled(tokens: Any, kind: str, text: str, *, flexible: bool) -> tuple[Any, bytes]:
    """A matcher at the start of a grammar, and the packed set of the tokens that may come first.

    Args:
        tokens: llguidance's vocabulary.
        kind: Of the grammar, as `StructuredOutputsParams` has it.
        text: The grammar.
        flexible: Whether JSON may have spaces and line breaks between its parts.

    Raises:
        ValueError: It does not compile or admits nothing, in llguidance's words.
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
        said = words(start.get_error())
        raise ValueError(f"structured_outputs: {kind} admits no text of the target's tokens: {said}")
    return start, first


def _lark(text: str) -> str:
    """A grammar in Lark's form, which it may have or not.

    llguidance's own test for that searches with a regular expression, whose time grows like the square of
    empty lines, with the interpreter's lock held.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark

    begins = (line.lstrip() for line in text.splitlines())
    if any(line.startswith("%llguidance") or line.partition(":")[0].rstrip() == "start" for line in begins):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # it raises errors of no single type
        raise ValueError(f"neither Lark nor GBNF: {error}") from error


def words(error: object) -> str:
    """What llguidance says, in one line and without the state that it appends."""
    said = str(error).partition("\n<state>")[0].partition("\n<non-verbose/>")[0]
    return " ".join(said.split())


class Trials:
    """What this file does as a program: a line with a vocabulary comes, then one for each grammar.

    The answer to each is a line: null, or why the grammar is refused. The process ends without an answer
    where a grammar takes too much.
    """

    def __init__(self, seconds: float, most_bytes: int):
        """Reads the vocabulary.

        Args:
            seconds: Processor time of each grammar.
            most_bytes: Memory of all of them, beside the vocabulary's.
        """
        import resource  # no system but Unix has it

        self._tokens, self._seconds = load_tokens(sys.stdin.readline()), seconds
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        statistics = Path("/proc/self/statm")
        if statistics.exists():  # elsewhere the memory of a process is not limited
            now = int(statistics.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + most_bytes, now + most_bytes))

    def run(self) -> None:
        """Answers until nobody asks any more."""
        for line in sys.stdin:
            # The signal ends the process whatever it does: nothing handles it.
            signal.setitimer(signal.ITIMER_PROF, self._seconds)
            answer = self._answer(**json.loads(line))
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(answer), flush=True)

    def _answer(self, **grammar: Any) -> str | None:
        try:
            matcher, mask = compiled(self._tokens, **grammar)
        except ValueError as error:
            return str(error)
        for step in range(_STEPS):
            token = self._token(mask, 7919 * step)
            if token is None or not matcher.consume_token(token):
                break
            mask = matcher.compute_bitmask()
            if matcher.is_error():
                break
        return None

    def _token(self, mask: bytes, start: int) -> int | None:
        """A token of a packed set that is text, from a place on; None if there is none."""
        text = bytearray(mask)
        for end in self._tokens.eos_tokens:
            text[end // 8] &= ~(1 << end % 8)
        start %= len(text)
        for begin, part in ((start, text[start:]), (0, text)):
            if found := part.lstrip(b"\0"):
                return 8 * (begin + len(part) - len(found)) + (found[0] & -found[0]).bit_length() - 1
        return None


def _main(seconds: str, most_bytes: str) -> None:
    # A thread has a stack of a size that is known.
    threading.stack_size(_STACK)
    thread = threading.Thread(target=lambda: Trials(float(seconds), int(most_bytes)).run())
    thread.start()
    thread.join()


if __name__ == "__main__":
    _main(*sys.argv[1:])
