"""Training blocks: the mask, the anchors, the teacher's rows, and agreement with decoding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from jetspec_jax import Head, Target, draft_logits, logits
from jetspec_jax.config import parse_draft_head_config, parse_model_config
from jetspec_jax.models import bind, build, weights_of
from train import layout
from train.attention import block_mask, causal_attend
from train.blocks import draft_blocks, sample_anchors, teacher_rows
from train.head import HeadData, distillation_loss
from train.recipes import TINY

B, T, K = 2, 10, TINY.distillation.block_size
ANCHORS = np.array([[0, 5, 5, T - K], [3, 6, 5, 0]])


def perturbed(weights, seed):
    """Weights with norms and scales unlike those of a fresh model, where much would cancel."""
    leaves, tree = jax.tree.flatten(weights)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    noise = [0.3 * jax.random.normal(k, w.shape) for k, w in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, [w + n for w, n in zip(leaves, noise, strict=True)])


@pytest.fixture(scope="module", params=[True, False], ids=["causal", "bidirectional"])
def pair(request):
    target_config = parse_model_config(layout.target_json(TINY))
    raw = layout.head_json(TINY)
    raw["dflash_config"]["causal_head"] = request.param
    head_config = parse_draft_head_config(raw)
    target = Target(target_config, perturbed(weights_of(build(target_config, rngs=nnx.Rngs(0))), 0))
    return target, Head(head_config, perturbed(weights_of(build(head_config, rngs=nnx.Rngs(1))), 1))


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(0).integers(2, TINY.vocab_size, (B, T)).astype(np.int32)


def block_logits(pair, tokens, anchors):
    """Draft logits ``[B, A, D, V]`` as training computes them."""
    target, head = bind(pair[0].config, pair[0].weights), bind(pair[1].config, pair[1].weights)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
    out = target(jnp.asarray(tokens), positions, causal_attend(), taps=head.config.tap_layers)
    hidden = draft_blocks(head, target, jnp.asarray(tokens), out.taps, jnp.asarray(anchors))[:, :, 1:]
    return target.logits(hidden.reshape(len(tokens), -1, hidden.shape[-1])).reshape(*hidden.shape[:3], -1)


def test_the_mask_of_the_docstring():
    mask = block_mask(jnp.array([[2]]), 4, 3, causal=True)[0, 0]
    expected = [[1, 1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 1, 1, 0], [1, 1, 0, 0, 1, 1, 1]]
    np.testing.assert_array_equal(mask, np.array(expected, bool))
    both = block_mask(jnp.array([[2]]), 4, 3, causal=False)[0, 0]
    np.testing.assert_array_equal(both, np.array([[1, 1, 0, 0, 1, 1, 1]] * 3, bool))


@pytest.mark.parametrize("causal", [True, False])
def test_the_mask_against_loops(causal):
    mask = block_mask(jnp.asarray(ANCHORS), T, K, causal=causal)
    for (b, a), anchor in np.ndenumerate(ANCHORS):
        for slot in range(K):
            row = [t < anchor for t in range(T)] + [j <= slot or not causal for j in range(K)]
            np.testing.assert_array_equal(mask[b, a, slot], row)


def test_a_block_gives_the_logits_of_decoding(pair, tokens):
    trained = block_logits(pair, tokens, ANCHORS)
    for (b, a), anchor in np.ndenumerate(ANCHORS):
        decoded = draft_logits(*pair, tokens[b : b + 1, : anchor + 1])
        np.testing.assert_allclose(trained[b, a], decoded[0], atol=1e-5, rtol=1e-5)


def test_a_block_depends_on_nothing_behind_its_anchor_nor_on_other_blocks(pair, tokens):
    anchors = np.array([[5, 2], [5, 6]])
    other = tokens.copy()
    other[:, 6:] = 7
    moved = np.array([[5, 4], [5, 1]])
    ours, theirs = block_logits(pair, tokens, anchors), block_logits(pair, other, moved)
    np.testing.assert_allclose(ours[:, 0], theirs[:, 0], atol=1e-5)
    other[:, 5] = 8
    assert np.abs(ours - block_logits(pair, other, anchors))[:, 0].max() > 1e-2


def test_teacher_rows_are_those_that_predict_the_slots():
    hidden = jnp.arange(T, dtype=jnp.float32)[None, :, None] * jnp.ones((B, 1, 3))
    rows = teacher_rows(hidden, jnp.asarray(ANCHORS), K)
    assert rows.shape == (B, 4, K - 1, 3)
    for (b, a), anchor in np.ndenumerate(ANCHORS):
        # Slot k drafts the token at anchor + k, which the row before that token predicts.
        np.testing.assert_array_equal(rows[b, a, :, 0], [anchor + k - 1 for k in range(1, K)])


def test_anchors_cover_what_the_target_wrote_and_leave_room_for_a_block():
    first = jnp.array([4, 0, T - K + 1])
    anchors = np.asarray(sample_anchors(jax.random.key(0), first, T, 400, K))
    assert set(anchors[0]) == set(range(3, T - K + 1))
    assert set(anchors[1]) == set(range(T - K + 1))
    assert set(anchors[2]) == {T - K}
    # One from each equal part: hardly uneven.
    assert np.ptp(np.bincount(anchors[1])) <= 4


def test_the_whole_loss_against_numpy(pair, tokens):
    target, head = pair
    settings = TINY.distillation
    loss = distillation_loss(head.config, target.config, settings, 3, jnp.dtype(jnp.float32))
    first = jnp.array([6, 6])
    data = HeadData(jnp.asarray(tokens, jnp.uint16), first, target.weights)
    key = jax.random.key(3)
    value, metrics = loss(head.weights, data, key)

    row_key, anchor_key = jax.random.split(key)
    rows = np.asarray(jax.random.randint(row_key, (3,), 0, B))
    anchors = np.asarray(sample_anchors(anchor_key, first[rows], T, settings.anchors, K))
    kl, matches = [], []
    for row, own in zip(rows, anchors, strict=True):
        teacher = np.asarray(logits(target, tokens[row : row + 1])[0], np.float64)
        for anchor in own:
            draft = np.asarray(draft_logits(*pair, tokens[row : row + 1, : anchor + 1])[0], np.float64)
            given = teacher[anchor : anchor + K - 1]
            log_p, log_q = (scipy.special.log_softmax(x, axis=-1) for x in (given, draft))
            kl.append((np.exp(log_p) * (log_p - log_q)).sum(-1))
            matches.append(draft.argmax(-1) == given.argmax(-1))
    assert float(value) == pytest.approx(np.mean(kl), rel=1e-4)
    np.testing.assert_allclose(metrics["loss_by_depth"], np.mean(kl, axis=0), rtol=1e-4)
    np.testing.assert_allclose(metrics["accuracy_by_depth"], np.mean(matches, axis=0), atol=1e-6)
    leading = np.cumprod(matches, axis=1).sum(1).mean()
    assert float(metrics["accepted_length"]) == pytest.approx(leading, rel=1e-5)


def test_the_gradient_against_finite_differences(pair, tokens):
    target, head = pair
    loss = distillation_loss(head.config, target.config, TINY.distillation, 2, jnp.dtype(jnp.float32))
    data = HeadData(jnp.asarray(tokens, jnp.uint16), jnp.array([4, 6]), target.weights)

    @jax.jit
    def value(weights):
        return loss(weights, data, jax.random.key(0))[0]

    gradient = jax.jit(jax.grad(value))(head.weights)
    for seed in range(3):
        direction = perturbed(jax.tree.map(jnp.zeros_like, head.weights), seed + 10)
        expected = sum(
            float(jnp.vdot(g, d))
            for g, d in zip(jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True)
        )
        step = 2e-3
        up, down = (
            float(value(jax.tree.map(lambda w, d, s=sign: w + s * d, head.weights, direction)))
            for sign in (step, -step)
        )
        assert (up - down) / (2 * step) == pytest.approx(expected, rel=2e-2, abs=2e-2)
