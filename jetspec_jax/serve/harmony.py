"""Parser of GPT-OSS's answers: a sequence of messages, each with a header and a text.

    <|channel|>analysis<|message|>A thought.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"x": 1}<|call|>

The prompt ends inside the first header. OpenAI describes the format in its guide to the harmony format.
"""

import re

from jetspec_jax.serve.calls import Call, call_with, held, read_value
from jetspec_jax.serve.parsers import MARKS

_MARK = re.compile("|".join(map(re.escape, MARKS)))
_TO, _FUNCTIONS = "to=", "functions."
_RECIPIENT = re.compile(rf"(?:^|\s){_TO}([^\s<]+)")


class Harmony:
    """Splits messages into reasoning (thoughts and messages to tools), answer (all others), and calls.

    Messages of the same kind are separated by a line feed. Marks are never text.
    """

    def __init__(self, *, begun: bool = False, reads_calls: bool = False):
        """Starts without text.

        ``begun``: the prompt ends inside the text of a thought. ``reads_calls``: messages to functions are
        calls; if the text of one is not a JSON object, it is part of the answer.
        """
        self._pending, self._reads_calls = "", reads_calls
        # The pieces of the current header; None inside the text of a message.
        self._header: list[str] | None = None if begun else []
        # Text before the first mark is a header only if it begins with a recipient; its first characters.
        self._unmarked, self._first = not begun, ""
        self._is_thought, self._function = begun, ""
        self._arguments: list[str] = []
        # The kinds of messages (is it a thought?) with text so far, and whether the current one has none.
        self._emitted: set[bool] = set()
        self._is_new = True

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str, list[Call]]:
        """Processes a piece of text; returns new reasoning, new answer and new calls."""
        texts: dict[bool, list[str]] = {True: [], False: []}
        calls: list[Call] = []
        text, place = self._pending + text, 0
        while found := _MARK.search(text, place):
            self._text(text[place : found.start()], texts)
            self._mark(found[0], texts, calls)
            place = found.end()
        end = len(text) if last else len(text) - held(text[place:], *MARKS)
        self._text(text[place:end], texts)
        self._pending = text[end:]
        if last and self._unmarked and self._header:
            self._answer("".join(self._header), texts)
        if last:
            self._end(texts, calls)
        return "".join(texts[True]), "".join(texts[False]), calls

    def _text(self, text: str, texts: dict[bool, list[str]]) -> None:
        if self._header is None:
            self._emit(text, texts)
            return
        self._header.append(text)
        if self._unmarked:
            self._first = (self._first + text).lstrip()[: len(_TO)]
            if not _TO.startswith(self._first):
                self._answer("".join(self._header), texts)

    def _answer(self, text: str, texts: dict[bool, list[str]]) -> None:
        """Begins an answer without a header."""
        self._begin(thought=False)
        self._emit(text, texts)

    def _mark(self, mark: str, texts: dict[bool, list[str]], calls: list[Call]) -> None:
        if self._header is None and mark not in ("<|message|>", "<|constrain|>"):
            self._end(texts, calls)
            self._header = []
        if self._header is not None:
            if mark == "<|message|>":
                self._begin_as("".join(self._header))
            elif mark in ("<|channel|>", "<|constrain|>"):
                self._header.append(f" {mark}")
            else:
                self._header = []
        self._unmarked = False

    def _begin_as(self, header: str) -> None:
        """Begins the text of a message with this header."""
        _, _, rest = header.partition("<|channel|>")
        channel = rest.replace("<", " ").split(maxsplit=1)[:1]
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else ""
        self._begin(thought=channel == ["analysis"] or bool(recipient))
        if self._reads_calls and recipient.startswith(_FUNCTIONS):
            self._function = recipient.removeprefix(_FUNCTIONS)

    def _begin(self, *, thought: bool) -> None:
        self._header, self._is_thought, self._is_new, self._function = None, thought, True, ""

    def _emit(self, text: str, texts: dict[bool, list[str]]) -> None:
        if self._function:
            self._arguments.append(text)
        elif text:
            between = "\n" if self._is_new and self._is_thought in self._emitted else ""
            texts[self._is_thought].append(between + text)
            self._emitted.add(self._is_thought)
            self._is_new = False

    def _end(self, texts: dict[bool, list[str]], calls: list[Call]) -> None:
        """Ends a message; if it is a call, its arguments are complete."""
        if self._header is None and self._function:
            text, self._arguments = "".join(self._arguments), []
            call = call_with(self._function, read_value(text))
            if call is None:
                self._answer(text, texts)
            else:
                calls.append(call)
