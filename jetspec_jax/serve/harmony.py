"""GPT-OSS's answers, which are a sequence of messages: each has a header, and a text for somebody.

    <|channel|>analysis<|message|>A thought.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"x": 1}<|call|>

The prompt has begun the first header. OpenAI describes the form in the guide to its harmony response format.
"""

import re

from jetspec_jax.serve.calls import Call, call_with, held, read_value

_MARKS = ("start", "end", "message", "channel", "constrain", "return", "call")
_WHOLE = tuple(f"<|{name}|>" for name in _MARKS)
_MARK = re.compile(rf"<\|({'|'.join(_MARKS)})\|>")
_TO, _FUNCTIONS = "to=", "functions."
_RECIPIENT = re.compile(rf"(?:^|\s){_TO}([^\s<]+)")


class Harmony:
    """Takes messages apart. Thoughts and messages to tools are reasoning, all other messages are the answer.

    A line feed stands between two messages of one kind. Marks are never text.
    """

    def __init__(self, *, begun: bool = False, reads_calls: bool = False):
        """Begins before the first piece.

        Args:
            begun: Whether the prompt has begun the text of a thought.
            reads_calls: Whether messages to functions are calls. If the text of such a message is no JSON
                object, it is part of the answer.
        """
        self._pending, self._reads_calls = "", reads_calls
        # Of the message's header, while that is read; None in the message's text.
        self._header: list[str] | None = None if begun else []
        # What stands before the first mark is a header only if it names a recipient; its first characters.
        self._unmarked, self._first = not begun, ""
        self._is_thought, self._function = begun, ""
        self._arguments: list[str] = []
        # Kinds of messages that have been told, by whether they are thoughts; whether this one has been.
        self._told: set[bool] = set()
        self._is_new = True

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str, list[Call]]:
        """Takes a piece of text; gives what is known now of reasoning, answer and calls."""
        told: dict[bool, list[str]] = {True: [], False: []}
        calls: list[Call] = []
        text, place = self._pending + text, 0
        while found := _MARK.search(text, place):
            self._text(text[place : found.start()], told)
            self._mark(found[1], told, calls)
            place = found.end()
        end = len(text) if last else len(text) - held(text[place:], *_WHOLE)
        self._text(text[place:end], told)
        self._pending = text[end:]
        if last and self._unmarked and self._header:
            self._answer("".join(self._header), told)
        if last:
            self._end(told, calls)
        return "".join(told[True]), "".join(told[False]), calls

    def _text(self, text: str, told: dict[bool, list[str]]) -> None:
        if self._header is None:
            self._tell(text, told)
            return
        self._header.append(text)
        if self._unmarked:
            self._first = (self._first + text).lstrip()[: len(_TO)]
            if not _TO.startswith(self._first):
                self._answer("".join(self._header), told)

    def _answer(self, text: str, told: dict[bool, list[str]]) -> None:
        """Begins an answer that has no header."""
        self._begin(thought=False)
        self._tell(text, told)

    def _mark(self, name: str, told: dict[bool, list[str]], calls: list[Call]) -> None:
        if self._header is None and name not in ("message", "constrain"):
            self._end(told, calls)
            self._header = []
        if self._header is not None:
            if name == "message":
                self._begin_as("".join(self._header))
            elif name in ("channel", "constrain"):
                self._header.append(f" <|{name}|>")
            else:
                self._header = []
        self._unmarked = False

    def _begin_as(self, header: str) -> None:
        """Begins the text of a message."""
        _, _, rest = header.partition("<|channel|>")
        channel = rest.replace("<", " ").split(maxsplit=1)[:1]
        found = _RECIPIENT.search(header)
        recipient = found[1] if found else ""
        self._begin(thought=channel == ["analysis"] or bool(recipient))
        if self._reads_calls and recipient.startswith(_FUNCTIONS):
            self._function = recipient.removeprefix(_FUNCTIONS)

    def _begin(self, *, thought: bool) -> None:
        self._header, self._is_thought, self._is_new, self._function = None, thought, True, ""
        self._unmarked = False

    def _tell(self, text: str, told: dict[bool, list[str]]) -> None:
        if self._function:
            self._arguments.append(text)
        elif text:
            between = "\n" if self._is_new and self._is_thought in self._told else ""
            told[self._is_thought].append(between + text)
            self._told.add(self._is_thought)
            self._is_new = False

    def _end(self, told: dict[bool, list[str]], calls: list[Call]) -> None:
        """Ends a message; of a call, all arguments are here now."""
        if self._header is None and self._function:
            text, self._arguments = "".join(self._arguments), []
            call = call_with(self._function, read_value(text))
            if call is None:
                self._answer(text, told)
            else:
                calls.append(call)
