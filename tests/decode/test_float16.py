"""Decoding in float16, whose numbers end at 65504: as long as they do not, only near-ties part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import Head, SamplingParams, Target, generate, generate_tree
from jetspec_jax.inspect.exactness import first_divergence
from tests.decode.ties import choice_rows
from tests.decode.tiny import TINY, random_head, random_target

PROMPTS = [np.random.default_rng(seed).integers(0, 64, 11 + seed).tolist() for seed in range(4)]
PARAMS = [
    SamplingParams(max_tokens=40, temperature=temperature, seed=5) for temperature in (0.0, 0.0, 0.7, 1.0)
]
# A step of float16 between 2 and 4, where the largest logits are.
STEP = 2.0**-9


def halved(weights):
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), weights)


@pytest.fixture(scope="module")
def exact():
    return random_target(TINY, 3)


@pytest.fixture(scope="module")
def target(exact):
    return Target(TINY, halved(exact.weights))


def halved_head():
    head = random_head(TINY, 3)
    return Head(head.config, halved(head.weights))


@pytest.fixture(scope="module")
def trees(target):
    return generate_tree(target, halved_head(), PROMPTS, PARAMS, budget=16, width=3, max_slots=4)


def test_logits_are_those_of_float32_but_for_rounding(exact, target):
    rows = choice_rows(target, PROMPTS[0], PROMPTS[1], PARAMS[0])
    assert np.abs(rows - choice_rows(exact, PROMPTS[0], PROMPTS[1], PARAMS[0])).max() < 8 * STEP


@pytest.mark.wide
def test_a_tree_commits_what_a_forward_chooses_but_for_near_ties(target, trees):
    for prompt, params, tree in zip(PROMPTS, PARAMS, trees, strict=True):
        rows = choice_rows(target, prompt, tree.token_ids, params)
        assert len(set(tree.token_ids)) > 3
        behind = rows.max(axis=-1) - rows[np.arange(40), tree.token_ids]
        assert behind.max() < 8 * STEP / (params.temperature or 1)
        assert (behind == 0).mean() > 0.9


def test_hidden_states_that_outgrow_it(target):
    layers = {
        i: {**layer, "mlp": {**layer["mlp"], "down_proj": jnp.full((48, 32), 3e4, jnp.float16)}}
        for i, layer in target.weights["layers"].items()
    }
    loud = Target(TINY, {**target.weights, "layers": layers})
    with pytest.raises(ValueError, match=r"logits are not numbers: .* may in float16$"):
        generate_tree(loud, halved_head(), PROMPTS, PARAMS, budget=16, width=3, max_slots=4)


@pytest.mark.wide
def test_trees_and_plain_decoding_part_at_near_ties_alone(target, trees):
    plain = generate(target, PROMPTS, PARAMS, max_slots=4)
    for prompt, params, tree, own in zip(PROMPTS, PARAMS, trees, plain, strict=True):
        found = first_divergence(target, prompt, params, tree.token_ids, own.token_ids)
        assert found is None or found.behind < 8 * STEP / (params.temperature or 1), found
