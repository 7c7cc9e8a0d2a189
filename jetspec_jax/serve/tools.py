"""Calls of tools in a model's text, found while it arrives."""

import contextlib
import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from pydantic import Field

from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.bodies import Body
from jetspec_jax.serve.reasoning import held

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)


class Function(Body):
    """A function that a model may call."""

    name: str = Field(pattern=r"^[\w.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool; all tools are functions."""

    type: Literal["function"]
    function: Function


class ChosenName(Body):
    """The name of a function."""

    name: str


class Chosen(Body):
    """A tool that the model has to call."""

    type: Literal["function"]
    function: ChosenName


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


def read_json_call(text: str, _: Sequence[Tool]) -> Call | None:
    """A call as ``{"name": …, "arguments": {…}}``; None if the text is none."""
    try:
        return _described_call(_json(text))
    except (ValueError, RecursionError):
        return None


def _described_call(value: Any) -> Call | None:
    """The call that a JSON value describes.

    Raises:
        RecursionError: Its arguments are nested too deeply.
    """
    if not isinstance(value, dict) or not isinstance(name := value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    return Call(name, json.dumps(arguments, ensure_ascii=False))


def read_tagged_call(text: str, tools: Sequence[Tool]) -> Call | None:
    """A call as ``<function=name><parameter=key>value</parameter></function>``; None if the text is none.

    What the tool's schema does not call a string is read as JSON.
    """
    found = _FUNCTION.fullmatch(text)
    if found is None:
        return None
    name = found[1].strip()
    schema = next((own.function.parameters for own in tools if own.function.name == name), None) or {}
    properties = schema.get("properties")
    arguments = {}
    for key, value in _PARAMETER.findall(found[2]):
        key, value = key.strip(), value.removeprefix("\n").removesuffix("\n")
        own = properties.get(key) if isinstance(properties, dict) else None
        if not (isinstance(own, dict) and own.get("type") == "string"):
            with contextlib.suppress(ValueError, RecursionError):
                value = _json(value)
        arguments[key] = value
    try:
        return Call(name, json.dumps(arguments, ensure_ascii=False))
    except RecursionError:
        return None


def _json(text: str) -> Any:
    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


#: What reads a call between its tags, by name of ``--tool-call-parser``.
READERS: dict[str, Callable[[str, Sequence[Tool]], Call | None]] = {
    "hermes": read_json_call,
    "qwen3_coder": read_tagged_call,
    "qwen3_xml": read_tagged_call,
}


class TaggedCalls:
    """Finds calls between tags. What is no call stays text, and so does a call that is never closed."""

    def __init__(self, parser: str, tools: Sequence[Tool]):
        """Begins before the first piece of text."""
        self._read, self._tools, self._text, self._any = READERS[parser], tools, "", False

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """Takes a piece of text; gives what is known now of the text without calls, and whole calls."""
        self._text += text
        content, calls = "", []
        while True:
            before, opened, rest = self._text.partition(_OPEN)
            if not opened:
                break
            inside, closed, after = rest.partition(_CLOSE)
            if not closed:
                break
            call = self._read(inside, self._tools)
            if call is None:
                content += self._shown(before) + opened + inside + closed
                self._any = False
            else:
                # Spaces around calls are the template's.
                content += self._shown(before).rstrip()
                calls.append(call)
                self._any = True
            self._text = after
        if last:
            content += self._shown(self._text)
            self._text = ""
        else:
            place = self._text.find(_OPEN)
            kept = place if place >= 0 else len(self._text) - held(self._text, _OPEN)
            kept = len(self._text[:kept].rstrip())
            content += self._shown(self._text[:kept])
            self._text = self._text[kept:]
        return content, calls

    def _shown(self, text: str) -> str:
        """Text after a call begins with what is no space."""
        if self._any:
            text = text.lstrip()
            self._any = not text
        return text


class NamedCall:
    """The whole text is the arguments of one function."""

    def __init__(self, name: str):
        """Begins before the first piece of text."""
        self._name, self._text = name, ""

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """As `TaggedCalls.feed`."""
        self._text += text
        if not last:
            return "", []
        return "", [Call(self._name, self._text)]


class ListedCalls:
    """The whole text is a list of calls."""

    def __init__(self) -> None:
        """Begins before the first piece of text."""
        self._text = ""

    def feed(self, text: str, *, last: bool = False) -> tuple[str, list[Call]]:
        """As `TaggedCalls.feed`."""
        self._text += text
        if not last:
            return "", []
        calls = []
        with contextlib.suppress(ValueError, RecursionError):
            listed = _json(self._text)
            calls = [_described_call(own) for own in listed] if isinstance(listed, list) else []
        whole = [call for call in calls if call is not None]
        # What is cut off or nested too deeply is no list of calls.
        return ("", whole) if whole and len(whole) == len(calls) else (self._text, [])


def form_of(tools: Sequence[Tool], name: str | None) -> StructuredOutputsParams:
    """The form of a text that calls one function, or without a name any of them, at least one."""
    if name is not None:
        [own] = [tool.function.parameters or _ANY for tool in tools if tool.function.name == name]
        return StructuredOutputsParams(json=own, disable_any_whitespace=True)
    each = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": tool.function.parameters or _ANY,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    listed = {"type": "array", "minItems": 1, "items": {"anyOf": each}}
    return StructuredOutputsParams(json=listed, disable_any_whitespace=True)


_ANY = {"type": "object"}
