"""Requests that follow grammars, beside others: models with random weights, whose tokens are bytes."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams, StructuredOutputsParams, generate, generate_tree, logits
from jetspec_jax.inspect.exactness import perturbed_logits
from jetspec_jax.inspect.trace import trace_rounds
from tests.decode.compilations import compilations
from tests.decode.tiny import SLIDING, random_head, random_target
from tests.mesh.tiny import on_mesh
from tests.meshes import mesh_of
from tests.sampling.byte_tokenizer import SPECIAL, byte_tokenizer

SETTINGS = {"budget": 16, "width": 3}
PROMPT = [5, 9, 2, 7]


def pair(without=""):
    """A target with a tokenizer of bytes, and a head for it."""
    tokenizer = byte_tokenizer(without)
    end = tokenizer.convert_tokens_to_ids(SPECIAL[0])
    config = dataclasses.replace(SLIDING, vocab_size=len(tokenizer) + 6)
    target = random_target(config, 3, eos=(end,), tokenizer=tokenizer)
    return target, random_head(config, 4)


@pytest.fixture(scope="module")
def models():
    return pair()


def structured(temperature=1.0, seed=0, max_tokens=40, **form):
    return SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        structured_outputs=StructuredOutputsParams(**form),
    )


ARRAY = {"type": "array", "items": {"enum": [12, "no", None]}, "minItems": 2, "maxItems": 3}
FREE = SamplingParams(max_tokens=24, temperature=1.0, seed=9)
PARAMS = [
    structured(regex="(ab|é){2,5}!"),
    FREE,
    structured(choice=["yes", "no", "abc"], seed=1),
    structured(0.0, json=ARRAY, disable_any_whitespace=True),
    dataclasses.replace(FREE, temperature=0.0),
    structured(grammar='start: "ab" item+\nitem: /[0-9]/ | "yes"', max_tokens=9, seed=2),
]


def check(params, completion):
    """That a text has the form that was asked for, or is the beginning of one."""
    text = completion.text
    if params.structured_outputs is None:
        return
    kind, source = params.structured_outputs.source
    if kind == "grammar":
        assert re.fullmatch("ab([0-9]|yes?|y)*", text)
    elif kind == "regex":
        assert re.fullmatch(source, text)
    elif kind == "choice":
        assert text in json.loads(source)
    else:
        assert len(json.loads(text)) in (2, 3)
        assert set(json.loads(text)) <= {12, "no", None}
    assert completion.finish_reason == "stop" or kind == "grammar"


def test_trees_and_plain_steps_of_a_mixed_batch(models):
    """Whoever has a grammar keeps to it, whoever has none gets its tokens, and others wait for a slot."""
    target, head = models
    alone = [generate(target, [PROMPT], own)[0] for own in PARAMS]
    prompts = [PROMPT] * len(PARAMS)
    outputs = generate_tree(target, head, prompts, PARAMS, **SETTINGS, max_slots=4)
    for params, own, plain in zip(PARAMS, outputs, alone, strict=True):
        assert own.token_ids == plain.token_ids
        check(params, own)
    with compilations() as seen:  # of other grammars too
        other = [*PARAMS[:2], structured(regex="[a-c]{3}"), *PARAMS[3:]]
        again = generate_tree(target, head, prompts, other, **SETTINGS, max_slots=4)
    assert seen == []
    assert again[0].token_ids == outputs[0].token_ids
    assert re.fullmatch("[a-c]{3}", again[2].text)


@pytest.mark.wide
def test_other_parameters_come_after_the_grammar(models):
    """Penalties, biases and words within it, log-probabilities of the raw distribution; also none is left."""
    target, head = models
    form = StructuredOutputsParams(regex="([a-c]|é|12)+!")
    first = SamplingParams(
        temperature=1.0,
        seed=2,
        max_tokens=24,
        structured_outputs=form,
        presence_penalty=1.0,
        logit_bias={0: 5.0},  # which is "!"
        bad_words=["ab"],
        logprobs=1,
    )
    params = [first, dataclasses.replace(first, temperature=0.0, repetition_penalty=1.3), FREE]
    alone = [generate(target, [PROMPT], own)[0] for own in params]
    outputs = generate_tree(target, head, [PROMPT] * 3, params, **SETTINGS)
    for own, plain in zip(outputs, alone, strict=True):
        assert own.token_ids == plain.token_ids
    for asked, own in zip(params, outputs[:2], strict=False):
        assert re.fullmatch("([a-c]|é|12)+!?", own.text)
        assert "ab" not in own.text
        for place, token in enumerate(own.token_ids):
            row = perturbed_logits(target, PROMPT, own.token_ids[:place], asked)
            assert row.argmax() == token
        told = [row[token].logprob for row, token in zip(own.logprobs, own.token_ids, strict=True)]
        np.testing.assert_allclose(told, raw_logprobs(target, own.token_ids), atol=1e-4)
    short = StructuredOutputsParams(choice=["ab"])
    other = [dataclasses.replace(first, min_tokens=3, structured_outputs=short), *params[1:]]
    with pytest.raises(ValueError, match="no token is left to choose: the grammar, allowed_token_ids"):
        generate_tree(target, head, [PROMPT] * 3, other, **SETTINGS)
    again = generate_tree(target, head, [PROMPT] * 3, params, **SETTINGS)
    assert [own.token_ids for own in again] == [own.token_ids for own in outputs]


def raw_logprobs(target, tokens):
    rows = jax.nn.log_softmax(logits(target, [[*PROMPT, *tokens]])[0, len(PROMPT) - 1 : -1])
    return np.take_along_axis(np.asarray(rows), np.array(tokens)[:, None], axis=1)[:, 0]


def test_several_completions_of_a_prompt(models):
    params = dataclasses.replace(structured(regex="[0-9a-z]{4}", seed=3), n=3)
    outputs = generate_tree(*models, [PROMPT], params, **SETTINGS)[0].outputs
    assert len({own.text for own in outputs}) == 3
    assert all(re.fullmatch("[0-9a-z]{4}", own.text) for own in outputs)


@pytest.mark.wide
def test_on_a_mesh(models):
    target, head = on_mesh(models, mesh_of(1, 2))
    outputs = generate_tree(target, head, [PROMPT] * 2, PARAMS[:2], **SETTINGS)
    alone = generate(models[0], [PROMPT] * 2, PARAMS[:2])
    assert [own.token_ids for own in outputs] == [own.token_ids for own in alone]


def test_a_grammar_that_has_no_way_on_is_an_error():
    """No token is a "z". What comes after such a call is served."""
    target, head = pair(without="z")
    llm = LLM(target, head, **SETTINGS)
    with pytest.raises(ValueError, match="structured_outputs: the text ends where the grammar goes on"):
        llm.generate([PROMPT], structured(regex="abz"))
    assert llm.generate([PROMPT], structured(choice=["ab"]))[0].text == "ab"


def test_what_cannot_be_is_said_before_anything_runs(models, no_type_checks):
    target, head = models
    good = structured(regex="a")
    with pytest.raises(
        ValueError, match=r"prompts\[1\]: structured_outputs: regex does not compile: .*unclosed"
    ):
        generate(target, [PROMPT] * 2, [good, structured(regex="(a")])
    with pytest.raises(ValueError, match="structured_outputs and ignore_eos contradict"):
        SamplingParams(structured_outputs=good.structured_outputs, ignore_eos=True)
    with pytest.raises(TypeError, match="structured_outputs must be StructuredOutputsParams or None"):
        SamplingParams(structured_outputs={"regex": "a"})
    bare = dataclasses.replace(target, tokenizer=None)
    with pytest.raises(ValueError, match="structured_outputs needs a tokenizer"):
        generate(bare, [PROMPT], good)
    endless = dataclasses.replace(target, eos_token_ids=())
    with pytest.raises(ValueError, match="needs a token that ends the text"):
        generate(endless, [PROMPT], good)
    with pytest.raises(ValueError, match="structured_outputs cannot be traced"):
        trace_rounds(target, head, PROMPT, good)
