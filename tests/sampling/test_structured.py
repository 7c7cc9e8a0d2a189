"""What form a text must have: one form of each, and what is refused."""

import pytest

from jetspec_jax.sampling.structured import MOST_REPEATS, StructuredOutputsParams


def test_equal_forms_are_equal_and_hashable():
    forms = [
        StructuredOutputsParams(json={"type": "array"}),
        StructuredOutputsParams(json='{"type":  "array"}'),
        StructuredOutputsParams(json={"type": "array"}, json_object=False),
    ]
    assert len(set(forms)) == 1
    assert forms[0].source == ("json", '{"type": "array"}')
    assert StructuredOutputsParams(json_object=True).source == ("json_object", '{"type": "object"}')
    assert StructuredOutputsParams(choice=["a", "é"]) == StructuredOutputsParams(choice=("a", "é"))
    assert StructuredOutputsParams(choice=["a"]).source == ("choice", '["a"]')


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object; given: none"),
        ({"regex": "a", "choice": ["a"]}, "given: regex and choice"),
        ({"regex": "a", "disable_any_whitespace": True}, "is for json and json_object, not for regex"),
        ({"json": "{"}, "json is no JSON schema"),
        ({"json": '{"a": ' * 5000 + "1" + "}" * 5000}, "json is no JSON schema"),
        ({"json": {"default": float("nan")}}, "json is no JSON schema"),
        ({"json": "[1]"}, "json must be a JSON schema, an object"),
        ({"json": {"items": [{"maxLength": MOST_REPEATS + 1}]}}, "maxLength in json must be at most"),
        ({"choice": []}, "choice must hold at least one text"),
        ({"choice": ["\ud800"]}, "surrogate"),
        ({"regex": ""}, "regex must not be empty"),
        ({"regex": "a{3,1000001}"}, "regex must repeat nothing more than"),
        ({"regex": "{" + "9" * 60_000 + "}"}, "regex must repeat nothing more than"),
        ({"grammar": 'start: "a"{1000001}'}, "grammar must repeat nothing more than"),
        ({"grammar": "start: \ud800"}, "surrogate"),
    ],
)
def test_values_that_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize(
    "given", [{"json": 5}, {"regex": 5}, {"choice": "ab"}, {"choice": [5]}, {"json_object": "yes"}]
)
def test_types_that_are_refused(given):
    with pytest.raises(TypeError, match=f"{next(iter(given))}"):
        StructuredOutputsParams(**given)


@pytest.mark.parametrize("part", ["{ ", "{ 1 ", "{1,", " ", "{", "1"])
@pytest.mark.parametrize("name", ["regex", "grammar"])
def test_a_scan_for_repeats_reads_each_character_once(name, part):
    text = "{" + part * 200_000 + "x"
    assert StructuredOutputsParams(**{name: text}).source == (name, text)
