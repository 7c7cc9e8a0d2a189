"""Scores of draft rows: the formula, its bits at temperature 0, and rows without tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.decode.proposer import scales_at
from jetspec_jax.sampling.adjust import Adjustments
from jetspec_jax.sampling.choice import choose_tokens, gumbel_noise
from jetspec_jax.sampling.drafting import DraftScoring
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.tree import Plan, grow_tree, top_candidates
from tests.marks import wide
from tests.meshes import agreed, on_parts, padded

B, D, V, K = 4, 5, 64, 8
PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=-5),
    SamplingParams(temperature=0.3, seed=2**64 - 1, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.5, seed=7, top_p=0.6),
]
POSITIONS = jnp.array([3, 1, 900, 0], jnp.int32)


def batch_of(params):
    return jax.tree.map(
        lambda *rows: jnp.stack([jnp.asarray(row) for row in rows]), *map(Sampling.of, params)
    )


def scoring_of(params, *, scales=None, adjust=None, local=V, vocab_size=None):
    sampling = batch_of(params)
    noise = gumbel_noise(sampling.key, POSITIONS, D, local=local, vocab_size=vocab_size)
    if scales is not None:
        scales = scales_at(jnp.asarray(scales, jnp.float32), sampling.temperature)
    return DraftScoring(sampling.temperature, noise, adjust, scales)


def drafted(logits, scoring, count=K):
    adjusted = scoring.adjusted(logits)
    return top_candidates(adjusted, count, scoring.perturbed(adjusted))


def rows_of(seed, scale=2.0):
    return np.random.default_rng(seed).normal(0, scale, (B, D, V)).astype(np.float32)


def log_softmax(values):
    below = values - values.max(-1, keepdims=True)
    return below - np.log(np.exp(below).sum(-1, keepdims=True))


OF_BANDS = [[2, 1, 1, 1, 1], [1, 0.5, 2, 0.9, 1.1], [0.7, 0.8, 0.9, 1, 1.2]]


@pytest.mark.parametrize("scales", [None, [1, 0.5, 2, 0.9, 1.1], OF_BANDS])
def test_scores_are_the_definition_s(scales):
    logits, scoring = rows_of(0), scoring_of(PARAMS, scales=scales)
    found = jax.jit(drafted)(logits, scoring)
    noise = np.asarray(scoring.noise, np.float64)
    for b, params in enumerate(PARAMS):
        for d in range(D):
            row = logits[b, d].astype(np.float64)
            # The bands are T = 0, up to 0.8 and above; the slots are at 0, 1, 0.3 and 1.5.
            of_slot = scales[[0, 2, 1, 2][b]] if scales is OF_BANDS else scales or [1] * D
            scores = log_softmax((row + params.temperature * noise[b, d]) / of_slot[d])
            tokens = np.argsort(-scores, kind="stable")[:K]
            assert found.tokens[b, d].tolist() == tokens.tolist()
            np.testing.assert_allclose(found.log_probs[b, d], scores[tokens], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(found.draft_log_probs[b, d], log_softmax(row)[tokens], atol=1e-5)
            probs = np.exp(scores)
            entropy = -np.sum(probs * scores)
            np.testing.assert_allclose(found.entropies[b, d], entropy, atol=1e-4)


def test_the_best_of_the_target_s_rows_is_its_choice():
    """A perfect head's first candidate: the noise of the same position, at the same temperature."""
    params = [SamplingParams(temperature=own.temperature, seed=own.seed) for own in PARAMS]
    logits, scoring, sampling = rows_of(1), scoring_of(params), batch_of(params)
    depths = jnp.broadcast_to(jnp.arange(D, dtype=jnp.int32), (B, D))
    choices = choose_tokens(jnp.asarray(logits), depths, POSITIONS, sampling, max_depth=D - 1)
    assert jax.jit(drafted)(logits, scoring).tokens[:, :, 0].tolist() == choices.tolist()


def test_greedy_rows_keep_their_bits():
    logits = rows_of(2)
    logits[:, :, ::3] = -0.0
    logits[:, :, 1::3] = 0.0
    scoring = scoring_of([SamplingParams()] * B, scales=[1] * D)
    adjusted = scoring.adjusted(jnp.asarray(logits))
    assert np.asarray(scoring.perturbed(adjusted)).tobytes() == logits.tobytes()
    assert_same(jax.jit(drafted)(logits, scoring), jax.jit(top_candidates, static_argnums=1)(logits, K))


def assert_same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_greedy_slot_among_sampled_ones_is_as_alone():
    logits = rows_of(3)
    mixed = jax.jit(drafted)(logits, scoring_of(PARAMS))
    greedy = jax.jit(drafted)(logits, scoring_of([SamplingParams()] * B))
    assert_same(jax.tree.map(lambda x: x[0], mixed), jax.tree.map(lambda x: x[0], greedy))


def test_adjustments_are_those_of_the_committed_history():
    params = SamplingParams(
        logit_bias={5: 2.0},
        repetition_penalty=1.5,
        presence_penalty=0.5,
        min_tokens=4,
        seed=1,
        temperature=1.0,
    )
    settings = {"vocab_size": V, "prompt": [1, 2], "output": [3, 3], "endings": [9]}
    one = Adjustments.of(params, **settings, bad_words=[[3, 8]], words=(1, 2))
    adjust = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (B, *np.shape(x))), one)
    logits = rows_of(4)
    found = scoring_of([params] * B, adjust=adjust).adjusted(jnp.asarray(logits))
    expected = logits.copy()
    expected[:, :, 5] += 2
    repeated = np.where(expected > 0, expected / 1.5, expected * 1.5)
    expected[:, :, 1:4] = repeated[:, :, 1:4]
    expected[:, :, 3] -= 0.5
    expected[:, :2, 9] = -np.inf  # two tokens are there, so two rows are before the fourth
    expected[:, 0, 8] = -np.inf  # only the first row knows the token before
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1.0, 1e30])
def test_rows_with_few_tokens_or_none(temperature):
    """What cannot be chosen is never a node, and nothing is NaN."""
    logits = rows_of(5)
    logits[0, 0, 3:] = -np.inf
    logits[1, 1, :] = -np.inf
    logits[2, 2, 1:] = -np.inf
    scoring = scoring_of(
        [SamplingParams(temperature=temperature, seed=s) for s in range(B)], scales=[1e-3, 1e3, 0.7, 1, 1]
    )
    found = jax.jit(drafted)(logits, scoring)
    for leaf in jax.tree.leaves(found):
        assert not np.isnan(leaf).any()
    assert (found.log_probs <= 1e-6).all()
    assert np.isneginf(found.log_probs[0, 0, 3:]).all()
    assert np.isneginf(found.log_probs[1, 1]).all()
    caps, roots = jnp.full((B, D), K, jnp.int32), jnp.zeros(B, jnp.int32)
    full = jnp.full(B, 64, jnp.int32)
    tree = grow_tree(found, roots, Plan(caps), full, full, num_nodes=64, one_by_one=True)
    counts = np.asarray(tree.num_nodes)
    assert np.isfinite(np.where(np.arange(64) < counts[:, None], tree.scores, 0)).all()
    assert (counts == 64).tolist() == [True, False, True, True]


@pytest.mark.parametrize(("mesh", "vocab"), [((1, 2), V), wide((2, 4), 61)])
def test_parts_have_the_scores_of_the_whole(mesh, vocab):
    logits = rows_of(6)[:, :, :vocab]
    logits[0, 0, 4:] = -np.inf
    scoring = scoring_of(PARAMS, scales=[1, 0.5, 2, 0.9, 1.1], local=vocab)
    whole = jax.jit(drafted)(logits, scoring)
    parts = mesh[0] * mesh[1]
    local = -(-vocab // parts)

    def run(logits):
        return drafted(logits, scoring_of(PARAMS, scales=scoring.scales, local=local, vocab_size=vocab))

    found = agreed(on_parts(run, *mesh)(padded(logits, parts)))
    assert (found.tokens == np.asarray(whole.tokens)).all()
    for name in ("log_probs", "entropies", "draft_log_probs"):
        np.testing.assert_allclose(getattr(found, name), getattr(whole, name), rtol=1e-5, atol=1e-5)
