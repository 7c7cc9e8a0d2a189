"""Packed documents give the losses, metrics and gradients of the documents alone, in every family."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.decode.tiny import random_weights
from tests.marks import wide
from tests.mesh.tiny import VOCAB, config_of, head_config
from train.loss import distillation
from train.loss.attention import packed_bits
from train.loss.blocks import count_anchors, learnable
from train.loss.distillation import distillation_loss, target_states
from train.loss.objectives import Objective

# Longer and shorter than the windows of 8; padding follows them.
LENGTHS, WINDOW = (13, 5, 9), 30
STARTS = np.repeat([0, 13, 18, 27], [*LENGTHS, 3])[None].astype(np.int32)
#: Windows, sinks and experts at once.
DEFAULT = "gpt_oss"


def documents(seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB - 1, length).astype(np.int32) for length in LENGTHS]


def packed(tokens, taught=(0, 1, 2)):
    batch = {
        "tokens": np.zeros((1, WINDOW), np.int32),
        "learn": np.zeros((1, WINDOW), bool),
        "starts": STARTS,
    }
    for i, own in enumerate(tokens):
        part = slice(STARTS[0, sum(LENGTHS[:i])], sum(LENGTHS[: i + 1]))
        batch["tokens"][0, part] = own
        # Its first token too: no block may learn it.
        batch["learn"][0, part] = i in taught
    return {**batch, "real": np.array([sum(LENGTHS)], np.int32)}


def alone(tokens):
    batch = {
        name: np.zeros((3, max(LENGTHS)), kind) for name, kind in (("tokens", np.int32), ("learn", bool))
    }
    for i, own in enumerate(tokens):
        batch["tokens"][i, : len(own)], batch["learn"][i, : len(own)] = own, True
    return {**batch, "real": np.array(LENGTHS, np.int32)}


# In each document the first token, some, and one whose block reaches beyond the end.
ANCHORS = np.array([[0, 4, 11, 11], [0, 2, 3, 3], [0, 5, 6, 7]])
SHIFTED = (ANCHORS + np.array([[0], [13], [18]])).reshape(1, -1)


@functools.cache
def program(family):
    """Means and gradient of a family's head at given anchors, and the arguments that stay."""
    config = config_of(family)
    head = head_config(config)
    loss = distillation_loss(head, config, Objective("forward_kl", gamma=4.0, chunk=16), jnp.dtype("float32"))

    @jax.jit
    def run(weights, frozen, batch, anchors):
        def total(weights):
            means = loss(weights, frozen, batch, jax.random.key(0))
            return means["loss"].value(), {name: mean.value() for name, mean in means.items()}

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(distillation, "sample_anchors", lambda *_: anchors)
            return jax.grad(total, has_aux=True)(weights)

    return functools.partial(run, random_weights(head, 1), random_weights(config, 0))


def assert_close(found, expected):
    def close(x, y):
        # Summed in another order: relative to the largest element.
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4 * max(1e-3, float(np.abs(y).max())))

    jax.tree.map(close, found, expected)


# Windows, experts and sinks; full attention of another scale and cap; a recurrence.
FAMILIES = [DEFAULT, wide("gemma4"), wide("qwen3_next")]


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_metrics_and_gradients_are_those_of_the_documents_alone(family):
    run, tokens = program(family), documents(0)
    gradient, means = run(packed(tokens), SHIFTED)
    expected_gradient, expected = run(alone(tokens), ANCHORS)
    assert float(expected["loss"]) > 0.1
    assert_close(means, expected)
    assert_close(gradient, expected_gradient)
    assert int(means["real_tokens"]) == sum(LENGTHS)
    assert int(means["learnable_tokens"]) == sum(LENGTHS) - 3
    assert int(means["distinct_anchors"]) == 10


@pytest.mark.parametrize("layout", [packed, wide(alone)])
def test_kept_states_of_the_target_give_the_same_losses_and_gradients(layout):
    run, batch, anchors = program(DEFAULT), layout(documents(0)), SHIFTED if layout is packed else ANCHORS
    config, (weights, frozen) = config_of(DEFAULT), run.args
    states = jax.jit(target_states(head_config(config), config, jnp.dtype("float32")))(frozen, batch)
    kept = batch | {"states": np.asarray(states)}
    found = run(kept, anchors)
    assert_close(found, run(batch, anchors))
    # The target does not run again: its layers may hold anything.
    spoilt = frozen | {"layers": jax.tree.map(lambda x: x * np.nan, frozen["layers"])}
    jax.tree.map(np.testing.assert_array_equal, run.func(weights, spoilt, kept, anchors), found)
    other = batch | {"states": 2 * kept["states"]}
    assert float(run(other, anchors)[1]["loss"]) != float(found[1]["loss"])


@pytest.mark.parametrize("family", FAMILIES)
def test_another_document_changes_nothing_of_its_neighbours(family):
    run, tokens = program(family), documents(0)
    # All anchors in the first document and the last; what is learnt of the one between them is nothing.
    anchors = SHIFTED[:, [0, 1, 2, 3, 0, 1, 8, 9, 10, 11, 8, 9]]
    before = run(packed(tokens, taught=(0, 2)), anchors)
    tokens[1] = documents(1)[1]
    assert_close(run(packed(tokens, taught=(0, 2)), anchors), before)


def test_the_mask_of_the_docstring():
    bits = packed_bits(jnp.array([[0, 0, 2, 2]]))[0, :, 0]
    np.testing.assert_array_equal(bits, [0b0001, 0b0011, 0b0100, 0b1100])


def test_first_tokens_are_not_learnt_and_anchors_are_counted_once():
    learn, starts = jnp.ones((2, 5), bool), jnp.array([[0, 0, 2, 2, 2], [0, 1, 2, 3, 4]])
    np.testing.assert_array_equal(learnable(learn, starts), [[0, 1, 0, 1, 1], [0] * 5])
    np.testing.assert_array_equal(learnable(learn, None), [[0, 1, 1, 1, 1]] * 2)
    anchors = jnp.array([[0, 0, 2, 3], [0, 0, 0, 0]])
    # The second sequence has nothing to learn, so its anchors are none.
    assert int(count_anchors(anchors, learnable(learn, starts))) == 3
