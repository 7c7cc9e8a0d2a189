"""The blocks' attention by chunks, against dense float64, and what it stores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.models.layers import KV
from tests.marks import wide
from train.loss import block_attention
from train.loss.block_attention import block_attend, visible, visible_in_block

B, T, A, K, G, R, E = 2, 23, 7, 3, 2, 2, 4
SCALE = 0.7


def test_the_masks_of_the_docstrings():
    seen = visible(jnp.array([[0, 3, 3]]), jnp.array([[2, 3, 5]]), 0, 7)[0]
    expected = [[1, 1, 0, 0, 0, 0, 0], [0] * 7, [0, 0, 0, 1, 1, 0, 0]]
    np.testing.assert_array_equal(seen, np.array(expected, bool))
    # A chunk of the same.
    some = visible(jnp.array([[0, 3, 3]]), jnp.array([[2, 3, 5]]), 2, 3)[0]
    np.testing.assert_array_equal(some, np.array(expected, bool)[:, 2:5])
    np.testing.assert_array_equal(visible_in_block(3, causal=True), np.tri(3, dtype=bool))
    np.testing.assert_array_equal(visible_in_block(3, causal=False), np.ones((3, 3), bool))


def dense(q, k, v, keys, values, begins, anchors, causal):
    """All scores at once, in float64."""
    q = q.reshape(B, A, K, G, R, E)
    k, v = (x.reshape(B, A, K, G, E) for x in (k, v))
    outer = SCALE * np.einsum("bakgre,btge->bakgrt", q, keys)
    inner = SCALE * np.einsum("bakgre,bajge->bakgrj", q, k)
    tokens = np.arange(T)
    seen = (tokens >= begins[:, :, None]) & (tokens < anchors[:, :, None])
    outer = np.where(seen[:, :, None, None, None], outer, -np.inf)
    inner = np.where((np.tri(K) > 0)[:, None, None, :] | (not causal), inner, -np.inf)
    scores = np.concatenate([outer, inner], -1)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bakgrt,btge->bakgre", weights[..., :T], values)
    out += np.einsum("bakgrj,bajge->bakgre", weights[..., T:], v)
    return weights, out


def dense_gradients(q, k, v, keys, values, begins, anchors, causal, given):
    """Of sum(given * out), by hand, in float64."""
    weights, out = dense(q, k, v, keys, values, begins, anchors, causal)
    q = q.reshape(B, A, K, G, R, E)
    k, v = (x.reshape(B, A, K, G, E) for x in (k, v))
    given = given.reshape(B, A, K, G, R, E)
    pull = np.concatenate(
        [np.einsum("bakgre,btge->bakgrt", given, values), np.einsum("bakgre,bajge->bakgrj", given, v)], -1
    )
    pull = SCALE * weights * (pull - (given * out).sum(-1, keepdims=True))
    outer, inner = pull[..., :T], pull[..., T:]
    dq = np.einsum("bakgrt,btge->bakgre", outer, keys) + np.einsum("bakgrj,bajge->bakgre", inner, k)
    return (
        dq.reshape(B, A * K, G * R, E),
        np.einsum("bakgrj,bakgre->bajge", inner, q).reshape(B, A * K, G, E),
        np.einsum("bakgrj,bakgre->bajge", weights[..., T:], given).reshape(B, A * K, G, E),
        np.einsum("bakgrt,bakgre->btge", outer, q),
        np.einsum("bakgrt,bakgre->btge", weights[..., :T], given),
    )


def drawn(seed):
    rng = np.random.default_rng(seed)
    shapes = (B, A * K, G * R, E), (B, A * K, G, E), (B, A * K, G, E), (B, T, G, E), (B, T, G, E)
    return [rng.normal(size=shape) for shape in shapes], rng.normal(size=shapes[0])


# Documents of 9 and 14 tokens in the first sequence; the second is one document. An anchor at a document's
# first token sees nothing before it.
ANCHORS = np.array([[0, 1, 8, 9, 12, 21, 21], [0, 5, 5, 6, 7, 8, 22]])
BEGINS = np.array([[0, 0, 0, 9, 9, 9, 9], [0] * 7])


def attended(q, k, v, keys, values, causal):
    attend = block_attend(
        (KV(keys, values),), jnp.asarray(ANCHORS), K, causal=causal, starts=jnp.asarray(BEGINS)
    )
    return attend(0, q, KV(k, v), scale=SCALE, window=None)


@pytest.mark.parametrize(
    ("causal", "slots", "tokens"),
    [(True, 6, 5), wide(True, 1, 7), wide(False, 1024, 4)],
)
def test_outputs_and_gradients_are_those_of_all_scores_at_once(monkeypatch, causal, slots, tokens):
    monkeypatch.setattr(block_attention, "SLOTS", slots)
    monkeypatch.setattr(block_attention, "TOKENS", tokens)
    arrays, given = drawn(0)

    def run(q, k, v, keys, values):
        return attended(q, k, v, keys, values, causal=causal)

    @jax.jit
    def both(*arrays):
        out, pull = jax.vjp(run, *arrays)
        return out, pull(jnp.asarray(given, jnp.float32))

    out, gradients = both(*(jnp.asarray(x, jnp.float32) for x in arrays))
    exact = [np.asarray(np.float32(x), np.float64) for x in arrays]
    expected = dense(*exact, BEGINS, ANCHORS, causal)[1]
    # Sums of at most 26 terms of size 1.
    np.testing.assert_allclose(out.reshape(expected.shape), expected, atol=1e-5)
    wanted = dense_gradients(*exact, BEGINS, ANCHORS, causal, np.float64(np.float32(given)))
    for one, other in zip(gradients, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_other_documents_change_no_bit(monkeypatch):
    monkeypatch.setattr(block_attention, "SLOTS", 6)
    monkeypatch.setattr(block_attention, "TOKENS", 5)
    arrays, _ = drawn(1)
    q, k, v, keys, values = (jnp.asarray(x, jnp.float32) for x in arrays)

    @jax.jit
    def run(keys, values):
        return attended(q, k, v, keys, values, causal=True)

    changed = run(keys.at[0, :9].set(100.0), values.at[0, :9].set(-100.0))
    np.testing.assert_array_equal(changed[0, 3 * K :], run(keys, values)[0, 3 * K :])


def test_a_window_of_32k_never_has_all_its_scores():
    # Qwen3-8B's head: the scores of one layer would take 34 GB.
    length, anchors, slots, heads, groups, size = 32_768, 512, 16, 32, 8, 128
    assert 4 * length * anchors * slots * heads > 34e9
    dtype = jnp.bfloat16
    q = jax.ShapeDtypeStruct((1, anchors * slots, heads, size), dtype)
    own = jax.ShapeDtypeStruct((1, anchors * slots, groups, size), dtype)
    context = jax.ShapeDtypeStruct((1, length, groups, size), dtype)
    places = jax.ShapeDtypeStruct((1, anchors), jnp.int32)

    def total(arrays, begins, anchors):
        q, k, v, keys, values = arrays
        attend = block_attend((KV(keys, values),), anchors, slots, causal=True, starts=begins)
        return jnp.sum(attend(0, q, KV(k, v), scale=1.0, window=None).astype(jnp.float32))

    program = jax.jit(jax.grad(total)).lower((q, own, own, context, context), places, places).compile()
    # What the chunks of scores and the sums of gradients take, in float32.
    assert program.memory_analysis().temp_size_in_bytes < 34e9 / 12
