"""Values as bare text, of the types that a schema gives them."""

import pytest

from jetspec_jax.sampling.closed_schema import referred
from jetspec_jax.serve import typed_values
from jetspec_jax.serve.typed_values import ObjectSchema

MAYBE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ANYTHING = {}
DEFINITIONS = {
    "Name": {"type": "string"},
    "Alias": {"$ref": "#/$defs/Name"},
    "Self": {"$ref": "#/$defs/Self"},
    "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Tree"}]},
    "a/b~c": {"type": "integer"},
}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "5", "5"),
        ({"type": "string"}, "null", "null"),
        ({"type": "string"}, ' "a" ', ' "a" '),
        (MAYBE_TEXT, "2139", "2139"),
        (MAYBE_TEXT, "null", None),
        (MAYBE_TEXT, "None", None),
        ({"type": ["string", "null"]}, "true", "true"),
        ({"type": "string", "nullable": True}, "null", None),
        ({"type": ["boolean", "null"]}, "false", False),
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "yes", "yes"),
        ({"type": "integer"}, " 7\n", 7),
        ({"type": "integer"}, "7.0", 7),
        ({"type": "integer"}, "7.5", 7.5),
        ({"type": "integer"}, "seven", "seven"),
        ({"type": "integer"}, "null", None),
        ({"type": "integer"}, "1" * 5000, "1" * 5000),
        ({"type": "number"}, "7", 7),
        ({"type": "number"}, "7.0", 7.0),
        ({"type": "number"}, "NaN", "NaN"),
        ({"type": "number"}, "1e999", "1e999"),
        ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "7", 7),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "7a", "7a"),
        ({"anyOf": [{"type": "string"}, {"pattern": "^a"}], "type": "string"}, "7", "7"),
        ({"allOf": [{"type": ["string", "integer"]}, {"type": ["string", "null"]}]}, "7", "7"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["a", None, True]}, "None", None),
        ({"enum": ["a", None, True]}, "True", True),
        ({"enum": ["a", "b"]}, " a ", "a"),
        ({"const": "1"}, "1", "1"),
        ({"$ref": "#/$defs/Name"}, "12", "12"),
        ({"$ref": "#/$defs/Alias"}, "12", "12"),
        ({"$ref": "#/$defs/a~1b~0c"}, "12", 12),
        ({"anyOf": [{"$ref": "#/$defs/Name"}, {"type": "null"}]}, "12", "12"),
        ({"$ref": "#/$defs/Self"}, "12", 12),
        ({"$ref": "#/$defs/Tree"}, "12", 12),
        ({"$ref": "#/$defs/Missing"}, "12", 12),
        ({"$ref": "elsewhere.json"}, "12", 12),
        ({"type": "array"}, '["a"]', ["a"]),
        ({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}, '["a"]', ["a"]),
        ({"type": "array"}, "['a', None, True]", ["a", None, True]),
        ({"type": "array"}, "a", "a"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}),
        ({"type": "object"}, "{'a': False}", {"a": False}),
        ({"type": "object"}, "{1, 2}", "{1, 2}"),
        ({"type": "object"}, r"{'a': '\d'}", {"a": r"\d"}),
        ({"type": "array"}, "[" + "None," * 100_000 + "]", "[" + "None," * 100_000 + "]"),
        ({"type": "object"}, "[" * 100_000, "[" * 100_000),
        ({"type": "string"}, '{"a": 1}', '{"a": 1}'),
        (ANYTHING, "true", True),
        (ANYTHING, "True", "True"),
        (ANYTHING, "null", None),
        (ANYTHING, "12", 12),
        (ANYTHING, "a", "a"),
        (ANYTHING, '"a"', "a"),
        (True, "12", 12),
        ({"type": 5, "enum": 5, "anyOf": 5}, "12", 12),
    ],
    ids=str,
)
def test_values(schema, text, value):
    got = ObjectSchema({"properties": {"x": schema}, "$defs": DEFINITIONS}).value("x", text)
    assert (type(got), got) == (type(value), value)


def test_properties_are_found_wherever_the_schema_has_them():
    own = {"properties": {"x": {"type": "string"}}}
    for root in (own, {"$ref": "#/$defs/Own", "$defs": {"Own": own}}, {"allOf": [{"type": "object"}, own]}):
        schema = ObjectSchema(root)
        assert (schema.value("x", "1"), schema.value("y", "1")) == ("1", 1)
        assert (schema.lists("x"), schema.lists("y")) == (True, False)
    assert ObjectSchema({"additionalProperties": {"type": "string"}}).value("y", "1") == "1"
    for root in (None, {}, {"properties": {}}, {"$ref": "#"}):
        assert ObjectSchema(root).lists("x")
        assert ObjectSchema(root).value("x", "1") == 1


def test_a_schema_that_is_nested_too_deeply_allows_all():
    def nested(own):
        for _ in range(90):
            own = {"anyOf": [own]}
        return own

    definitions = {str(place): nested({"$ref": f"#/$defs/{place + 1}"}) for place in range(100)}
    schema = ObjectSchema({"properties": {"x": {"$ref": "#/$defs/0"}}, "$defs": definitions})
    assert schema.value("x", "1") == 1


def test_one_schema_under_many_names_is_read_a_bounded_number_of_times(monkeypatch):
    read, names = [], [f"#/$defs/{'%74' * i}{'t' * (20 - i)}" for i in range(21)]
    names += [f"{name[:2]}%24{name[3:]}" for name in names]
    names += [name.replace("defs", "d%65fs") for name in names]
    monkeypatch.setattr(
        typed_values, "referred", lambda root, pointer: read.append(pointer) or referred(root, pointer)
    )
    branches = [{"$ref": name} for name in names]
    schema = ObjectSchema({"properties": {"x": {"anyOf": branches}}, "$defs": {"t" * 20: {"type": "string"}}})
    assert schema.value("x", "1") == 1  # a reference that is not resolved allows everything
    assert len(set(names)) > len([pointer for pointer in read if pointer]) == 64
