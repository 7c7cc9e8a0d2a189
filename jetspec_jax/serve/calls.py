"""Tool calls, and shared parts of their parsers."""

import contextlib
import json
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from jetspec_jax.serve.bodies import read_json


@dataclass
class Call:
    """A tool call.

    Attributes:
        name: The function's name.
        arguments: A JSON object as text.
        id: The id by which a tool's result refers to the call.
    """

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def as_json(self) -> dict[str, Any]:
        """The call in the form of a response."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class Finder(Protocol):
    """An incremental parser of tool calls, whose result does not depend on how the text is split."""

    def feed(self, text: str, *, last: bool = False, cut: bool = False) -> tuple[str, list[Call]]:
        """Parses a piece of text; returns the text outside of calls and the complete calls so far known.

        With ``cut`` the text ends at its length limit, so an open call is incomplete.
        """
        ...


def call_with(name: str, arguments: Any) -> Call | None:
    """A call; None if the arguments are not an object, or cannot be written as JSON."""
    if not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        # Half of a surrogate pair has no UTF-8, but can be sent escaped.
        return Call(name, text if text.isascii() or _is_unicode(text) else json.dumps(arguments))
    except (ValueError, RecursionError):
        return None


def call_of(value: Any) -> Call | None:
    """The call of a JSON value such as ``{"name": …, "arguments": {…}}``; None if it is not a call."""
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    # Some models write the object as a string.
    return call_with(name, read_value(arguments) if isinstance(arguments, str) else arguments)


def read_value(text: str) -> Any:
    """A JSON value from a model, which may have line feeds in strings; None if the text is not JSON."""
    with contextlib.suppress(ValueError, RecursionError):
        return read_json(text, strict=False)
    return None


def _is_unicode(text: str) -> bool:
    with contextlib.suppress(UnicodeEncodeError):
        return bool(text.encode())
    return False


def held(text: str, *markers: str) -> int:
    """The number of characters at the end of a text that may be the beginning of a marker."""
    longest = min(len(text), max(map(len, markers)) - 1)
    ends = (
        size for size in range(longest, 0, -1) if any(marker.startswith(text[-size:]) for marker in markers)
    )
    return next(ends, 0)


class Spaced:
    """Removes the whitespace that chat templates write around calls from the text between calls."""

    def __init__(self) -> None:
        self._spaces: list[str] = []
        self._after_call = False

    def text(self, text: str) -> str:
        """Processes a piece of text; returns the text that can be shown now."""
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
        """Marks the position of a call."""
        self._spaces.clear()
        self._after_call = True

    def end(self) -> str:
        """The remaining whitespace at the end of the text."""
        return "".join(self._spaces)


class WholeText:
    """A `Finder` that needs the whole text, and ``read`` to find its calls."""

    def __init__(self, read: Callable[[str], list[Call]]) -> None:
        self._pieces: list[str] = []
        self._read = read

    def feed(self, text: str, *, last: bool = False, cut: bool = False) -> tuple[str, list[Call]]:
        """As `Finder.feed`; a text without calls is returned as text."""
        self._pieces.append(text)
        if not last:
            return "", []
        whole = "".join(self._pieces)
        calls = self._read(whole)
        return ("", calls) if calls else (whole, [])


def named_call(name: str, whole: str) -> list[Call]:
    """The call of a text that is the arguments of one function, exactly as the model wrote them."""
    return [] if call_with(name, read_value(whole)) is None else [Call(name, whole)]
