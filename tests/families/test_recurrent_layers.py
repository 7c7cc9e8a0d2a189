"""The parts of Qwen3.5's and Qwen3-Next's layers, each alone, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache.block import Block
from jetspec_jax.models import bind
from jetspec_jax.models.layers import History
from tests.families import step_by_step
from tests.families.goldens import golden_file, golden_target
from tests.float64 import Rounding, assert_rounded, reference_of
from tests.marks import wide
from train.loss.attention import CausalAttend

# Of products of 32 terms at most: 32 roundings are 2e-6 of the terms' sizes.
TOLERANCE = 1e-5


def part(name, layer, block):
    """A golden's config, and the tensors of a block of one layer."""
    raw, tensors = golden_file(name)
    return raw, step_by_step.Tensors(tensors, f"model.layers.{layer}.{block}.")


def rows(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def close(ours, theirs):
    assert np.std(theirs) > 0.1
    size = np.maximum(1, np.abs(theirs).max(axis=-1, keepdims=True))
    np.testing.assert_array_less(np.abs(np.asarray(ours, np.float64) - theirs) / size, TOLERANCE)


def recurrence_of(name, layer, x, history):
    """What a golden's recurrent layer makes of rows: what it adds, and what it leaves for a store."""
    target = golden_target(name)

    @jax.jit
    def run(weights, x, history):
        return bind(target.config, weights).layers[layer].linear_attn(x, history)

    return run(target.weights, jnp.asarray(x), history)


@pytest.mark.parametrize(("name", "count"), [("qwen3_5", 200), ("qwen3_next", 200), wide("qwen3_5", 600)])
def test_recurrence_of_a_sequence(name, count):
    raw, tensors = part(name, 1, "linear_attn")
    x = rows(0, 1, count, 32)
    added, left = recurrence_of(name, 1, x, History(None, None, None))
    rounded = Rounding()
    chain = [*range(-1, count - 1)]
    samples, _ = step_by_step.recurrent(raw, tensors, rounded.sampled(x), chain, None, None, rounded)
    assert_rounded(added, reference_of(samples))
    close(left.rows[0], step_by_step.project(raw, tensors, x[0])[0])


def test_recurrence_of_documents_side_by_side():
    """Longer and shorter than a chunk and than the convolution: each begins anew."""
    name = "qwen3_next"
    raw, tensors = part(name, 1, "linear_attn")
    begins = np.zeros((1, 200), bool)
    begins[0, [0, 3, 4, 170, 198]] = True
    x = rows(0, 1, 200, 32)
    added, _ = recurrence_of(name, 1, x, History(None, None, None, jnp.asarray(begins)))
    chain = np.where(begins[0], -1, np.arange(-1, 199))
    rounded = Rounding()
    samples, _ = step_by_step.recurrent(raw, tensors, rounded.sampled(x), chain, None, None, rounded)
    assert_rounded(added, reference_of(samples))
    # No bit of another document counts.
    other = x.copy()
    other[0, 4:170] = rows(1, 166, 32)
    changed, _ = recurrence_of(name, 1, other, History(None, None, None, jnp.asarray(begins)))
    for neighbour in (slice(0, 4), slice(170, 200)):
        np.testing.assert_array_equal(changed[0, neighbour], added[0, neighbour])


def test_recurrence_of_a_tree():
    """Windows of the convolution and states follow parents, from the root on into what is stored."""
    name = "qwen3_next"
    raw, tensors = part(name, 1, "linear_attn")
    own = golden_target(name).config.layers[1].recurrence
    rng = np.random.default_rng(1)
    parents = np.array(
        [[-1, *(rng.integers(0, i) for i in range(1, 24))], [-1, 0, 1, 2, 3, 3, 2, 1, 0, *range(8, 23)]]
    )
    x = rows(2, 2, 24, 32)
    before = rows(3, 2, own.kernel - 1, own.channels)
    state = rows(4, 2, own.num_value_heads, own.key_dim, own.value_dim)
    history = History(jnp.asarray(before), jnp.asarray(state), jnp.asarray(parents, jnp.int32))
    added, left = recurrence_of(name, 1, x, history)
    for b in range(2):
        rounded = Rounding()
        sampled = rounded.sampled(x[b][None])
        samples, states = step_by_step.recurrent(
            raw, tensors, sampled, parents[b], before[b], state[b], rounded
        )
        assert_rounded(added[b], reference_of(samples[:, 0]))
        # What a store is left is the step from the parent's state to the own.
        step = (
            states[9][0, 0]
            - np.exp(np.asarray(left.decay, np.float64)[b, 9])[:, None, None] * states[parents[b, 9]][0, 0]
        )
        keys = np.repeat(left.k[b, 9], own.num_value_heads // own.num_key_heads, axis=0)
        close(np.einsum("vd,ve->vde", keys, left.delta[b, 9]), step)


def test_attention():
    name = "qwen3_5"
    raw, tensors = part(name, 3, "self_attn")
    target, x = golden_target(name), rows(5, 1, 40, 32)

    @jax.jit
    def run(weights, x):
        layer = bind(target.config, weights).layers[3].self_attn
        return layer(x, Block.chain(jnp.zeros((1, 40), jnp.int32)).depths, CausalAttend())[0]

    rounded = Rounding()
    samples = step_by_step.attention(raw, tensors, rounded.sampled(x), range(-1, 39), rounded)
    assert_rounded(run(target.weights, jnp.asarray(x)), reference_of(samples))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
def test_mixture(name):
    raw, tensors = part(name, 2, "mlp")
    target, x = golden_target(name), rows(6, 1, 20, 32)

    @jax.jit
    def run(weights, x):
        return bind(target.config, weights).layers[2].mlp(x)

    rounded = Rounding()
    samples = step_by_step.experts(raw, tensors, rounded.sampled(x), rounded)
    assert_rounded(run(target.weights, jnp.asarray(x)), reference_of(samples))
