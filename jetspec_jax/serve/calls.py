"""Calls of tools, and what the readers of them share."""

import contextlib
import json
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol

from jetspec_jax.serve.bodies import read_json


@dataclass
class Call:
    """A call of a tool.

    Attributes:
        name: Of the function.
        arguments: A JSON object as text.
        id: What its result refers to.
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def described(self) -> dict[str, Any]:
        """As a response has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Finder(Protocol):
    """Finds calls in a text that arrives in pieces; which calls it finds does not depend on the pieces."""

    def feed(self, text: str, *, last: bool = False, cut: bool = False) -> tuple[str, list[Call]]:
        """Takes a piece of text; gives what is known now of the text without calls, and whole calls.

        Args:
            text: The piece.
            last: Whether it is the last one.
            cut: Whether the text ends because it may not be longer, so that an open call is not whole.
        """
        ...


def call_with(name: str, arguments: Any) -> Call | None:
    """A call; None where the arguments are no object, or cannot be written as JSON."""
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # Half a surrogate pair has no UTF-8: escaped, it can be sent.
        return Call(name, text if text.isascii() or _is_unicode(text) else json.dumps(arguments))
    except (ValueError, RecursionError):
        return None


def described_call(value: Any) -> Call | None:
    """The call that a JSON value such as ``{"name": …, "arguments": {…}}`` describes; None if it is none."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    # Some models write the object as a string.
    return call_with(name, read_value(arguments) if isinstance(arguments, str) else arguments)


def read_value(text: str) -> Any:
    """A JSON value that a model wrote, maybe with line feeds in its strings; None where the text is none."""
    with contextlib.suppress(ValueError, RecursionError):
        return read_json(text, strict=False)
    return None


def _is_unicode(text: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        return bool(text.encode())
    return False


def held(text: str, *markers: str) -> int:
    """Characters at the end of a text that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    ends = (size for size in range(longest, 0, -1) if any(own.startswith(text[-size:]) for own in markers))
    return next(ends, 0)


class Spaced:
    """A text around calls, without the white space that the chat template writes around calls."""

    def __init__(self) -> None:
        """Begins before the first piece."""
        self._spaces: list[str] = []
        self._after_call = False

    def text(self, text: str) -> str:
        """Takes a piece of text; gives what may be shown."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        shown = text.rstrip()
        self._spaces.append(text[len(shown) :])
        if not shown:
            return ""
        shown = "".join(self._spaces[:-1]) + shown
        self._spaces = self._spaces[-1:]
        return shown

    def call(self) -> None:
        """A call stands here."""
        self._spaces.clear()
        self._after_call = True

    def end(self) -> str:
        """What is left."""
        return "".join(self._spaces)


class WholeText(ABC):
    """Calls of a text that can be read only once it has ended."""

    def __init__(self) -> None:
        """Begins before the first piece of text."""
        self._pieces: list[str] = []

    def feed(self, text: str, *, last: bool = False, cut: bool = False) -> tuple[str, list[Call]]:
        """As `Finder.feed`. A text that is not made of calls is text."""
        self._pieces.append(text)
        if not last:
            return "", []
        whole = "".join(self._pieces)
        calls = self.read(whole)
        return ("", calls) if calls else (whole, [])

    @abstractmethod
    def read(self, whole: str) -> list[Call]:
        """The calls that the text consists of; none where a part of it is no call."""


class NamedCall(WholeText):
    """The whole text is the arguments of one function."""

    def __init__(self, name: str):
        """Begins before the first piece of text."""
        super().__init__()
        self._name = name

    def read(self, whole: str) -> list[Call]:
        """The call, with its arguments as the model wrote them."""
        return [] if call_with(self._name, read_value(whole)) is None else [Call(self._name, whole)]


class ListedCalls(WholeText):
    """The whole text is a list of calls."""

    def read(self, whole: str) -> list[Call]:
        """The calls; none if the list was cut off, or one is nested too deeply."""
        listed = read_value(whole)
        found = [described_call(own) for own in listed] if isinstance(listed, list) else []
        calls = [call for call in found if call is not None]
        return calls if len(calls) == len(found) else []
