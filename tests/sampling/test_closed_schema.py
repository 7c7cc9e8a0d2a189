"""Objects of a schema have only the listed keys, except where another schema may list more."""

import json

import pytest

from jetspec_jax.sampling.compiling import compiled, load_tokens, serialized
from jetspec_jax.sampling.structured import StructuredOutputsParams
from tests.sampling.byte_tokenizer import byte_tokenizer

INT = {"type": "integer"}
A, B = ({"type": "object", "properties": {key: INT}} for key in "ab")


@pytest.fixture(scope="module")
def tokens():
    tokenizer = byte_tokenizer()
    return load_tokens(serialized(tokenizer, len(tokenizer), []))


def admits(tokens, outputs, value):
    kind, text = outputs.source
    start, _ = compiled(tokens, kind, text, flexible=False)
    matcher = start.deep_copy()
    return (
        all(
            matcher.consume_token(token)
            for token in tokens.tokenize_str(json.dumps(value, separators=(",", ":")))
        )
        and matcher.is_accepting()
    )


def listing(key, value=INT, **more):
    return {"type": "object", "properties": {key: value}, **more}


def test_the_usual_schema_of_a_model(tokens):
    schema = {
        "$defs": {"Pet": {"properties": {"a": INT}, "required": ["a"], "title": "Pet", "type": "object"}},
        "properties": {
            "one": {"$ref": "#/$defs/Pet", "description": "the first"},
            "more": {"items": {"$ref": "#/$defs/Pet"}, "type": "array"},
            "some": {"anyOf": [{"$ref": "#/$defs/Pet"}, {"type": "null"}], "default": None},
        },
        "title": "Person",
        "type": "object",
    }
    closed = StructuredOutputsParams(json=schema)
    opened = StructuredOutputsParams(json=schema, disable_additional_properties=False)
    assert admits(tokens, closed, {"one": {"a": 1}, "more": [{"a": 1}, {"a": 2}], "some": {"a": 3}})
    for value in (
        {"x": 1},
        {"one": {"a": 1, "x": 1}},
        {"more": [{"a": 1, "x": 2}]},
        {"some": {"a": 1, "x": 3}},
    ):
        assert not admits(tokens, closed, value)
        assert admits(tokens, opened, value)
    assert closed != opened
    assert closed.json == opened.json


@pytest.mark.parametrize(
    ("schema", "listed", "unlisted"),
    [
        (A, {"a": 1}, {"x": 1}),
        ({"properties": {}}, {}, {"x": 1}),
        ({"prefixItems": [A], "items": B}, [{"a": 1}, {"b": 1}], [{"a": 1}, {"b": 1, "x": 1}]),
        (listing("b", {"additionalProperties": A}), {"b": {"x": {"a": 1}}}, {"b": {"x": {"x": 1}}}),
        ({"anyOf": [A, B], "type": "object"}, {"b": 1}, {"b": 1, "x": 1}),
        ({"definitions": {"n/a": A}, "$ref": "#/definitions/n~1a"}, {"a": 1}, {"x": 1}),
        (listing("a", {"anyOf": [{"$ref": "#"}, INT]}), {"a": {"a": 1}}, {"a": {"x": 1}}),
        # The object is open, and the one in it closed.
        (
            listing("o", A, anyOf=[{"required": ["o"]}, {"required": ["x"]}]),
            {"o": {"a": 1}, "x": 1},
            {"o": {"x": 1}},
        ),
        # The property, not the keyword.
        (listing("properties", listing("a")), {"properties": {"a": 1}}, {"properties": {"x": 1}}),
    ],
    ids=str,
)
def test_closed(tokens, schema, listed, unlisted):
    assert admits(tokens, StructuredOutputsParams(json=schema), listed)
    assert not admits(tokens, StructuredOutputsParams(json=schema), unlisted)
    assert admits(tokens, StructuredOutputsParams(json=schema, disable_additional_properties=False), unlisted)


OPEN = [
    ({"type": "object"}, {"x": 1}),
    (listing("properties", {"type": "object"}), {"properties": {"x": 1}}),
    (listing("a", additionalProperties=True), {"x": 1}),
    (listing("a", required=["x"]), {"x": 1}),
    ({"patternProperties": {"^x": INT}, "required": ["x1"]}, {"x1": 1}),
    ({"allOf": [A, B]}, {"a": 1, "b": 1}),
    ({"allOf": [{"$ref": "#/$defs/A"}, B], "$defs": {"A": A}}, {"a": 1, "b": 1}),
    ({"allOf": [listing("o", A), listing("o", B)]}, {"o": {"a": 1, "b": 1}}),
    ({"anyOf": [A, INT], **B}, {"a": 1, "b": 1}),
    ({"anyOf": [A], "required": ["x"]}, {"a": 1, "x": 1}),
    ({"oneOf": [A, INT], **B}, {"a": 1, "b": 1}),
    ({"$ref": "#/$defs/A", **B, "$defs": {"A": A}}, {"a": 1, "b": 1}),
    ({"$ref": "#A", **B, "$defs": {"A": {"$anchor": "A", **A}}}, {"a": 1, "b": 1}),
    ({"properties": {"ab": A}, "patternProperties": {"^ab": B}}, {"ab": {"a": 1, "b": 1}}),
    ({**A, "enum": [{"a": 1}, {"x": 1}]}, {"x": 1}),
    ({**listing("a", B), "const": {"a": {"x": 1}}}, {"a": {"x": 1}}),
]


@pytest.mark.parametrize(("schema", "value"), OPEN, ids=str)
def test_not_closed(tokens, schema, value):
    opened = StructuredOutputsParams(json=schema, disable_additional_properties=False)
    assert admits(tokens, opened, value), "the test's value must be one of the schema as it is"
    assert admits(tokens, StructuredOutputsParams(json=schema), value)


def test_a_schema_may_be_anything():
    """What is malformed is llguidance's to refuse; a chain of references needs no stack."""
    chain = {f"{place}": {"$ref": f"#/$defs/{place + 1}"} for place in range(5000)}
    for schema in (
        {"properties": 5, "required": "a"},
        {"properties": [A], "anyOf": {"a": A}, "items": 3},
        {"required": [[]], **A},
        {"$ref": 5, **A},
        {"$ref": "#/prefixItems/9" + "9" * 5000, "prefixItems": [A]},
        {"$ref": "#/$defs/0", "$defs": chain},
        {"$ref": "#"},
    ):
        kind, text = StructuredOutputsParams(json=schema).source
        assert kind == "json"
        assert json.loads(text).keys() >= schema.keys()
