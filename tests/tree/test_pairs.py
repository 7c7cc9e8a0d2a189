"""Scores of pairs as probabilities, and the trees that grow of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.tree import Candidates, Plan, grow_tree, pair_log_probs, top_candidates

log_probs_of = jax.jit(pair_log_probs, static_argnames="tail")
grow = jax.jit(grow_tree, static_argnames=("num_nodes", "width", "one_by_one"))


def rows(seed, *shape, count=5, scale=3.0):
    rng = np.random.default_rng(seed)
    return top_candidates(jnp.asarray(rng.normal(0, scale, (*shape, 24)), jnp.float32), count)


def in_float64(log_probs, scores, *, tail):
    joint = log_probs.astype(np.float64)[..., None, :] + scores.astype(np.float64)
    rest = np.maximum(1 - np.exp(log_probs.astype(np.float64)).sum(-1), 0)[..., None] if tail else 0.0
    most = np.maximum(joint.max(-1), 0)
    return joint - (most + np.log(np.exp(joint - most[..., None]).sum(-1) + rest * np.exp(-most)))[..., None]


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("scale", [0.1, 3.0, 40.0])
def test_is_float64_s(tail, scale):
    drafted = np.asarray(rows(0, 3, 4).log_probs)
    scores = np.random.default_rng(1).normal(0, scale, (3, 4, 5, 5)).astype(np.float32)
    found = np.asarray(log_probs_of(drafted, scores, tail=tail))
    expected = in_float64(drafted, scores, tail=tail)
    # The tail is a difference from 1, whose rounding counts where the scores leave little else.
    kept = np.exp(drafted.astype(np.float64)[..., None, :] + scores).sum(-1, keepdims=True)
    rest = np.maximum(1 - np.exp(drafted.astype(np.float64)).sum(-1), 0)[..., None, None]
    total = kept + rest if tail else kept
    bound = 8 * np.finfo(np.float32).eps * (1 + np.abs(expected) + np.abs(scores).max() + 1 / total)
    assert (np.abs(found - expected) <= bound).all()
    assert (found <= 0).all()


def test_scores_of_zero_change_no_bit_where_the_tail_is_kept():
    for seed, scale in enumerate([0.1, 3.0, 30.0, 300.0]):
        drafted = rows(seed, 8, 15, count=16, scale=scale).log_probs
        found = log_probs_of(drafted, jnp.zeros((8, 15, 16, 16)), tail=True)
        np.testing.assert_array_equal(found, np.broadcast_to(drafted[:, :, None], found.shape))


def test_without_the_tail_the_candidates_have_all_of_the_probability():
    found = log_probs_of(rows(0, 2, 3).log_probs, jnp.ones((2, 3, 5, 5)), tail=False)
    np.testing.assert_allclose(np.exp(found).sum(-1), 1, rtol=1e-5)


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_pair_without_a_finite_score_is_impossible_and_spoils_no_other(value, tail):
    drafted = np.array(rows(0, 1, 1).log_probs)
    drafted[0, 0, 4] = -np.inf
    scores = np.zeros((1, 1, 5, 5), np.float32)
    scores[0, 0, 1, 2] = value
    scores[0, 0, 3] = value
    found = np.asarray(log_probs_of(drafted, scores, tail=tail))[0, 0]
    assert np.isneginf(found[1, 2])
    assert np.isneginf(found[3]).all()
    assert np.isneginf(found[:, 4]).all()
    assert np.isfinite(found[[0, 1, 2], :2]).all()


@pytest.mark.parametrize("score", [-300.0, 300.0])
def test_extreme_scores_stay_numbers(score):
    drafted = rows(0, 1, 2, count=24).log_probs
    found = np.asarray(log_probs_of(drafted, jnp.full((1, 2, 24, 24), score), tail=True))
    assert np.isfinite(found).all()
    assert (found <= 0).all()


def by_pairs(drafted, pairs):
    return Candidates(drafted.tokens, drafted.log_probs, drafted.entropies, pairs)


def full(depth, width, bonus=None):
    caps = jnp.full((2, depth), width, jnp.int32)
    return Plan(caps) if bonus is None else Plan(caps, bonus, 0.5)


LIMITS = (jnp.array([40, 41], jnp.int32), jnp.array([16, 9], jnp.int32), jnp.array([6, 3], jnp.int32))


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("width", [3, 5])
@pytest.mark.parametrize("weighed", [False, True])
def test_pairs_that_are_the_row_give_the_tree_of_the_row(one_by_one, width, weighed):
    drafted = rows(0, 2, 6)
    bonus = jnp.asarray(np.random.default_rng(2).normal(size=(2, 6)), jnp.float32) if weighed else None
    roots, budget, depth = LIMITS
    how = {"num_nodes": 16, "width": width, "one_by_one": one_by_one}
    shared = grow(drafted, roots, full(6, width, bonus), budget, depth, **how)
    pairs = jnp.broadcast_to(drafted.log_probs[:, :, None], (2, 6, 5, 5))
    own = grow(by_pairs(drafted, pairs), roots, full(6, width, bonus), budget, depth, **how)
    jax.tree.map(np.testing.assert_array_equal, shared, own)


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("weighed", [False, True])
def test_a_node_s_children_are_the_best_below_its_own_token(one_by_one, weighed):
    drafted = rows(1, 2, 6)
    scores = jnp.asarray(np.random.default_rng(3).normal(0, 3, (2, 6, 5, 5)), jnp.float32)
    pairs = pair_log_probs(drafted.log_probs, scores, tail=True)
    bonus = jnp.asarray(np.random.default_rng(2).normal(size=(2, 6)), jnp.float32) if weighed else None
    roots, budget, depth = LIMITS
    how = {"num_nodes": 16, "width": 3, "one_by_one": one_by_one}
    trees = grow(by_pairs(drafted, pairs), roots, full(6, 3, bonus), budget, depth, **how)
    for b in range(2):
        tree = jax.tree.map(lambda x, b=b: np.asarray(x)[b], trees)
        tokens, own, places = np.asarray(drafted.tokens)[b], np.asarray(pairs)[b], np.zeros(16, int)
        for node in range(1, tree.num_nodes):
            parent, row = tree.parents[node], tree.depths[node] - 1
            [places[node]] = np.flatnonzero(tokens[row] == tree.tokens[node])
            step = own[row, places[parent], places[node]]
            np.testing.assert_allclose(tree.scores[node], tree.scores[parent] + step, rtol=1e-5, atol=1e-5)
        for node in range(tree.num_nodes):
            chosen = places[: tree.num_nodes][tree.parents[: tree.num_nodes] == node]
            if len(chosen):
                best = np.argsort(-own[tree.depths[node], places[node]], kind="stable")
                assert chosen.tolist() == best[: len(chosen)].tolist()
