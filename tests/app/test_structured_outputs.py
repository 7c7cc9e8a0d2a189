"""Structured output of the demo pair: trees give plain decoding's tokens, and every text has its form."""

import json
import re

import pytest

from jetspec_jax import LLM, SamplingParams, StructuredOutputsParams
from jetspec_jax.inspect.exactness import first_divergence

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
NUMBERS = 'start: "[" number (", " number){0,3} "]"\nnumber: /[1-9][0-9]?/'


def is_person(text):
    value = json.loads(text)
    assert list(value) == ["name", "age", "tags"]
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 150
    assert set(value["tags"]) <= {"red", "green"}
    assert len(value["tags"]) <= 2


def is_object(text):
    assert isinstance(json.loads(text), dict)


def matches(regex):
    def check(text):
        assert re.fullmatch(regex, text), text

    return check


KINDS = {
    "json": (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), "person = ", is_person),
    "json_object": (
        StructuredOutputsParams(json_object=True, disable_any_whitespace=True),
        "settings = ",
        is_object,
    ),
    "regex": (
        StructuredOutputsParams(regex=r"\d{1,3}\.\d{2} [a-z]{1,4}!"),
        "total = ",
        matches(r"\d{1,3}\.\d\d [a-z]{1,4}!"),
    ),
    "choice": (StructuredOutputsParams(choice=["numpy", "os", "sys"]), "import ", matches("numpy|os|sys")),
    "grammar": (
        StructuredOutputsParams(grammar=NUMBERS),
        "values = ",
        matches(r"\[[1-9][0-9]?(, [1-9][0-9]?)*\]"),
    ),
}


@pytest.fixture(scope="module")
def plain():
    return LLM(budget=1, dtype="float32", max_slots=4)


@pytest.fixture(scope="module")
def llm(plain):
    return LLM(plain.target, "demo", budget=8, dtype="float32", max_slots=4)


@pytest.mark.wide
def test_trees_give_the_tokens_of_plain_decoding(plain, llm):
    params = [
        SamplingParams(
            temperature=0.0 if kind in ("json", "choice", "grammar") else 1.0,
            seed=3,
            max_tokens=40,
            structured_outputs=form,
        )
        for kind, (form, *_) in KINDS.items()
    ]
    prompts = [prompt for _, prompt, _ in KINDS.values()]
    trees, steps = (each.generate(prompts, params, use_tqdm=False) for each in (llm, plain))
    for own, prompt, tree, step in zip(params, prompts, trees, steps, strict=True):
        where = first_divergence(plain.target, plain.encode(prompt), own, tree.token_ids, step.token_ids)
        assert where is None or where.is_tie
    ended = 0
    for (_, _, check), tree in zip(KINDS.values(), trees, strict=True):
        if tree.finish_reason == "stop":
            check(tree.text)
            ended += 1
    assert ended >= 4  # all but any JSON object, which may be long
    # Drafts are of use under a grammar too.
    assert sum(own.rounds for own in trees) < 0.8 * sum(len(own.token_ids) for own in trees)
