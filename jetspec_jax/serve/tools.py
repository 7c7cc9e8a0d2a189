"""Tools in request bodies, and the grammar of a text that must call them."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from jetspec_jax.engine.prompts import naming
from jetspec_jax.sampling.structured import StructuredOutputsParams
from jetspec_jax.serve.bodies import Body

#: Parameters of a function without any, as in OpenAI's API.
_NONE = {"type": "object", "properties": {}}


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


def arguments_form(function: Function) -> StructuredOutputsParams:
    """The grammar of a function's arguments."""
    with naming(f"the parameters of {function.name}"):
        return StructuredOutputsParams(json=function.parameters or _NONE, disable_any_whitespace=True)


def calls_form(functions: Sequence[Function], *, several: bool) -> StructuredOutputsParams:
    """The grammar of a JSON list of calls of the functions: exactly one call, unless ``several`` are allowed.

    Each schema stays a document of its own, so that its references mean what they mean there.
    """
    rules = ['start: "[" call ("," call)* "]"' if several else 'start: "[" call "]"']
    rules.append(f"call: {' | '.join(f'call{place}' for place in range(len(functions)))}")
    for place, function in enumerate(functions):
        begin = f'{{"name":{json.dumps(function.name, ensure_ascii=False)},"arguments":'
        schema = json.loads(arguments_form(function).source[1])
        schema["x-guidance"] = {"whitespace_flexible": False}
        rules.append(f'call{place}: {json.dumps(begin, ensure_ascii=False)} arguments{place} "}}"')
        rules.append(f"arguments{place}: %json {json.dumps(schema)}")
    return StructuredOutputsParams(grammar="\n".join(rules))
