"""The grammar of required calls: one call or several, with every schema as it is alone."""

import json

import pytest
from pydantic import BaseModel

from jetspec_jax.sampling.grammar import Vocabulary
from jetspec_jax.serve.sampling import SamplingFields, sampling_params
from jetspec_jax.serve.settings import ServeSettings
from jetspec_jax.serve.tools import Function, arguments_form, calls_form
from tests.sampling.byte_tokenizer import byte_tokenizer

TOKENIZER = byte_tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<end>")


class Node(BaseModel):
    """As Python programs describe their tools."""

    value: int
    child: "Node | None" = None


class Tree(BaseModel):
    nodes: list[Node]


def object_of(required, **more):
    """A schema of an object with these properties, which are all required."""
    return {
        "type": "object",
        "properties": required,
        "required": [*required],
        "additionalProperties": False,
        **more,
    }


INTEGER, TEXT = {"type": "integer"}, {"enum": ["a", "b"]}
IN_X = object_of({"a": INTEGER})
#: Schemas with references: arguments that they allow, and arguments that they do not.
REFERENCES = {
    "$defs": (
        object_of({"x": {"$ref": "#/$defs/A"}}, **{"$defs": {"A": IN_X}}),
        {"x": {"a": 1}},
        {"x": {"b": 1}},
    ),
    "definitions": (
        object_of({"x": {"$ref": "#/definitions/A"}}, definitions={"A": TEXT}),
        {"x": "a"},
        {"x": 1},
    ),
    "properties": (
        object_of({"x": INTEGER, "y": {"$ref": "#/properties/x"}}),
        {"x": 1, "y": 2},
        {"x": 1, "y": "a"},
    ),
    "items": (
        object_of({"x": {"type": "array", "items": TEXT}, "y": {"$ref": "#/properties/x/items"}}),
        {"x": ["a"], "y": "b"},
        {"x": ["a"], "y": "c"},
    ),
    "the root": (
        object_of({"x": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}),
        {"x": {"x": {"x": None}}},
        {"x": {"name": "A"}},
    ),
    "$anchor": (
        object_of({"x": {"$ref": "#A"}}, **{"$defs": {"A": INTEGER | {"$anchor": "A"}}}),
        {"x": 1},
        {"x": "a"},
    ),
    "$id": (
        object_of({"x": {"$ref": "A"}}, **{"$defs": {"B": INTEGER | {"$id": "A"}}}),
        {"x": 1},
        {"x": "a"},
    ),
    "$id of the root": (
        object_of(
            {"x": {"$ref": "http://x/A#/$defs/B"}, "y": {"$ref": "#/$defs/B"}},
            **{"$id": "http://x/A", "$defs": {"B": INTEGER}},
        ),
        {"x": 1, "y": 2},
        {"x": 1, "y": "a"},
    ),
    "escaped": (
        object_of({"x": {"$ref": "#/$defs/a~1b%20c~0"}}, **{"$defs": {"a/b c~": INTEGER}}),
        {"x": 1},
        {"x": "a"},
    ),
    "data": (
        object_of({"$ref": {"enum": [{"$ref": "#/$defs/A"}]}}, **{"$defs": {"A": TEXT}}),
        {"$ref": {"$ref": "#/$defs/A"}},
        {"$ref": "a"},
    ),
    "pydantic's recursion": (
        Node.model_json_schema(),
        {"value": 1, "child": {"value": 2, "child": None}},
        {"value": 1, "child": {"value": "a"}},
    ),
    "pydantic's list": (Tree.model_json_schema(), {"nodes": [{"value": 1}]}, {"nodes": [{"value": "a"}]}),
}
#: Another tool, whose definitions have the names of the others' and other values.
OTHER = object_of(
    {"other": {"$ref": "#/$defs/A"}, "node": {"$ref": "#/definitions/A"}},
    **{
        "$id": "http://x/A",
        "$defs": {"A": {"enum": [7]}, "B": {"enum": [8]}},
        "definitions": {"A": {"enum": [9]}},
    },
)


@pytest.fixture(scope="module")
def allows():
    """Whether a grammar allows a JSON value as a whole text."""
    vocabulary = Vocabulary(TOKENIZER, len(TOKENIZER), [END])

    def check(form, value):
        matcher = vocabulary.matcher(form, [END])
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        matcher.advance([*TOKENIZER.encode(text), END])
        return matcher.problem is None

    return check


def call(name, arguments):
    return {"name": name, "arguments": arguments}


@pytest.mark.parametrize("name", REFERENCES)
@pytest.mark.parametrize("first", [True, False])
def test_references_mean_what_they_mean_alone(allows, name, first):
    schema, good, bad = REFERENCES[name]
    function, other = Function(name="look", parameters=schema), Function(name="other", parameters=OTHER)
    form = calls_form([function, other] if first else [other, function], several=True)
    assert allows(arguments_form(function), good)
    assert not allows(arguments_form(function), bad)
    others = call("other", {"other": 7, "node": 9})
    assert allows(form, [call("look", good), others, call("look", good)])
    for wrong in (call("look", bad), call("other", good), call("look", others["arguments"])):
        assert not allows(form, [wrong])
        assert not allows(form, [others, wrong])


def test_one_call_or_several(allows):
    functions = [
        Function(name="né.1-x", parameters={"type": "object"}),
        Function(name="look", parameters=IN_X),
    ]
    one, two = call("né.1-x", {"b": [1, {}]}), call("look", {"a": 1})
    for several in (True, False):
        form = calls_form(functions, several=several)
        assert allows(form, [one])
        assert allows(form, [two])
        assert allows(form, [one, two, one]) == several
        for wrong in ([], [{}], two, [call("unknown", {})], [{"name": "look"}], [two | {"more": 1}]):
            assert not allows(form, wrong)


@pytest.mark.parametrize("given", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_function_without_parameters_has_no_arguments(allows, given):
    now = Function(name="now", **given)
    form = calls_form([now], several=False)
    assert allows(arguments_form(now), {})
    assert allows(form, [call("now", {})])
    assert not allows(arguments_form(now), {"x": 1})
    assert not allows(form, [call("now", {"x": 1})])


@pytest.mark.parametrize("strict", [None, False, True])
def test_no_keys_that_a_request_does_not_list(allows, strict):
    schema = {"type": "object", "properties": {"x": INTEGER}}
    look, own = (
        Function(name="look", parameters=schema, strict=strict),
        {"structured_outputs": {"json": schema}},
    )
    named, form = arguments_form(look), calls_form([look], several=False)
    for arguments in ({}, {"x": 1}):
        assert allows(named, arguments)
        assert allows(form, [call("look", arguments)])
    assert not allows(named, {"y": 1})
    assert not allows(form, [call("look", {"y": 1})])
    shape = {"name": "s", "schema": schema, "strict": strict}
    for body, opens in (
        ({"response_format": {"type": "json_schema", "json_schema": shape}}, False),
        (own, False),
        ({"structured_outputs": {"json": json.dumps(schema), "disable_additional_properties": False}}, True),
    ):
        request = SamplingFields.model_validate(body)
        asked = sampling_params(request, ServeSettings(), max_tokens=9, logprobs=None).structured_outputs
        assert allows(asked, {"x": 1})
        assert allows(asked, {"y": 1}) == opens


@pytest.mark.parametrize("text", ['"quoted" \\ /a/ // # %json {5} é\n', "\\u0041", "{{}}"])
def test_texts_of_schemas_are_no_grammar(allows, text):
    function = Function(name="look", parameters=object_of({text: {"enum": [text], "description": text}}))
    form = calls_form([function], several=False)
    assert allows(form, [call("look", {text: text})])
    assert not allows(form, [call("look", {text: "a"})])
