"""Tools in bodies of requests, and the form of a text that has to call them."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.bodies import Body

_ANY = {"type": "object"}


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
