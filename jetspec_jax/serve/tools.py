"""Tools in request bodies, and the grammar of a text that must call them."""

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
    """A tool, which is always a function."""

    type: Literal["function"]
    function: Function


class ChosenName(Body):
    """The name of a function."""

    name: str


class Chosen(Body):
    """A tool that the model must call."""

    type: Literal["function"]
    function: ChosenName


def form_of(tools: Sequence[Tool], name: str | None) -> StructuredOutputsParams:
    """The grammar of a text that calls the function ``name``, or, if None, one or more of the tools."""
    if name is not None:
        [parameters] = [tool.function.parameters or _ANY for tool in tools if tool.function.name == name]
        return StructuredOutputsParams(json=parameters, disable_any_whitespace=True)
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
