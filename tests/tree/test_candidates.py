"""The best tokens of every draft row: of a whole vocabulary, and of one in parts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.tree import top_candidates
from tests.marks import wide
from tests.meshes import GATHER, agreed, on_parts, padded

jitted = jax.jit(top_candidates, static_argnums=1)


# 1 and 2027, a prime, have groups of one token, 2500 of 20, 9496, a sixteenth of Qwen3's, of 8.
@pytest.mark.parametrize(
    ("vocabulary", "width", "dtype"),
    [
        (1, 1, jnp.float32),
        (2500, 7, jnp.bfloat16),
        (9496, 7, jnp.float32),
        (2027, 7, jnp.float16),
    ],
)
def test_is_top_k(vocabulary, width, dtype):
    rng = np.random.default_rng(vocabulary + width)
    shape = (2, 3, vocabulary)
    for values in (rng.normal(0, 3, shape), rng.integers(0, 5, shape)):
        logits = jnp.asarray(values, dtype)
        found = jitted(logits, width)
        top, tokens = jax.lax.top_k(logits, width)
        np.testing.assert_array_equal(found.tokens, tokens)
        total = jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1, keepdims=True)
        np.testing.assert_allclose(found.log_probs, top.astype(jnp.float32) - total, atol=1e-5)


def test_tokens_of_probability_zero_come_last():
    logits = np.full((1, 1, 4096), -np.inf, np.float32)
    logits[0, 0, [4000, 5, 1030]] = [2.0, 1.0, 1.0]
    found = jitted(jnp.asarray(logits), 5)
    assert found.tokens[0, 0].tolist() == [4000, 5, 1030, 0, 1]
    assert np.isneginf(found.log_probs[0, 0, 3:]).all()


@functools.cache
def best(count):
    """Tokens, log-probabilities and entropies: what is stacked is no `Candidates`."""

    def run(logits):
        found = top_candidates(logits, count)
        return found.tokens, found.log_probs, found.entropies

    return run


# Of 67 tokens 8 parts have 9 each, and 2 parts 34: a width may be more than a part has, or all there are.
@pytest.mark.parametrize(
    ("mesh", "vocabulary", "width", "dtype"),
    [
        ((1, 2), 67, 1, jnp.bfloat16),
        ((2, 2), 67, 7, jnp.float32),
        ((2, 4), 67, 67, jnp.float32),
        ((1, 2), 4600, 7, jnp.float32),  # two chunks in each part
        wide((1, 3), 67, 67, jnp.bfloat16),
        wide((8, 1), 9496, 20, jnp.bfloat16),
    ],
)
def test_parts_have_the_candidates_of_the_whole(mesh, vocabulary, width, dtype):
    rng = np.random.default_rng(vocabulary + width)
    shape = (2, 3, vocabulary)
    for values in (rng.normal(0, 3, shape), rng.integers(0, 5, shape), np.full(shape, -300)):
        logits = values.astype(dtype)
        tokens, log_probs, entropies = agreed(on_parts(best(width), *mesh)(padded(logits, np.prod(mesh))))
        whole = jitted(logits, width)
        np.testing.assert_array_equal(tokens, whole.tokens)
        np.testing.assert_allclose(log_probs, whole.log_probs, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(entropies, whole.entropies, rtol=1e-6, atol=1e-6)


def test_parts_without_a_token():
    """Parts of -inf alone leave the others' figures; their tokens come last, the lower ids first."""
    logits = np.full((1, 3, 64), -np.inf, np.float32)
    logits[0, 0, [50, 5, 6]] = [2.0, 1.0, 1.0]
    logits[0, 1, 63] = -200.0
    logits[0, 2, [0, 63]] = [500.0, -500.0]
    tokens, log_probs, entropies = agreed(on_parts(best(6), 2, 4)(logits))
    whole = jitted(logits, 6)
    assert tokens[0].tolist() == [[50, 5, 6, 0, 1, 2], [63, 0, 1, 2, 3, 4], [0, 63, 1, 2, 3, 4]]
    np.testing.assert_allclose(log_probs, whole.log_probs, rtol=1e-6)
    np.testing.assert_allclose(entropies, whole.entropies, rtol=1e-6)
    assert not np.isnan(log_probs).any()


def test_parts_need_one_gather():
    text = on_parts(best(7), 2, 4).lower(np.zeros((2, 3, 64), np.float32)).as_text()
    assert text.count(GATHER) == text.count("stablehlo.all_") == 1
    whole = jitted.lower(np.zeros((2, 3, 64), np.float32), 7).as_text()
    assert "stablehlo.all_" not in whole
