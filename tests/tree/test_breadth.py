"""Width and candidates: most children of a node, and the tokens of a draft row that are looked at."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.tree import (
    Algorithm,
    Auto,
    Breadth,
    Plan,
    algorithm_names,
    breadth_of,
    build_tree,
    top_candidates,
)

LOGITS = np.random.default_rng(0).normal(0, 2, (2, 3, 40)).astype(np.float32)
ROOTS = np.arange(2)


@pytest.mark.parametrize(
    ("algorithm", "width", "candidates", "expected"),
    [
        ("accum_logp", None, None, (7, 7)),
        ("top_nodes", None, None, (32, 32)),
        ("auto", None, None, (32, 32)),
        (Auto("accum_logp"), None, None, (7, 7)),
        ("top_nodes", 3, None, (3, 3)),
        ("accum_logp", None, 32, (32, 32)),
        ("top_nodes", 3, 9, (3, 9)),
    ],
)
def test_what_is_left_open_follows(algorithm, width, candidates, expected):
    assert breadth_of(algorithm, width, candidates) == Breadth(*expected)


@pytest.mark.parametrize("name", algorithm_names())
def test_more_candidates_than_the_width_leave_a_tree_as_it_is(name):
    """The best children of a node are the first of its row, as long as no row knows its parent."""
    few, many = (
        build_tree(LOGITS, ROOTS, width=3, candidates=k, budget=32, algorithm=name) for k in (None, 9)
    )
    jax.tree.map(np.testing.assert_array_equal, few, many)
    assert np.bincount(np.asarray(few.parents[0, 1 : few.num_nodes[0]])).max() <= 3


@pytest.mark.parametrize(("name", "children"), [("accum_logp", 7), ("top_nodes", 32)])
def test_most_children_by_default(name, children):
    tree = build_tree(np.zeros((1, 1, 40), np.float32), [5], budget=64, algorithm=name)
    assert tree.num_nodes.tolist() == [1 + children]


def test_a_plan_sees_the_width_and_cannot_go_beyond_it():
    @dataclasses.dataclass(frozen=True)
    class Greedy(Algorithm):
        def plan(self, candidates, routing):
            assert candidates.tokens.shape == (2, 3, 2)
            return Plan(jnp.full((2, 3), 99, jnp.int32))

    tree = build_tree(LOGITS, ROOTS, width=2, candidates=5, budget=64, algorithm=Greedy())
    # Two, four and eight below the root.
    assert tree.num_nodes.tolist() == [15, 15]


def test_the_best_of_candidates_are_the_candidates_of_fewer():
    many = top_candidates(jnp.asarray(LOGITS), 9)
    jax.tree.map(np.testing.assert_array_equal, many.best(4), top_candidates(jnp.asarray(LOGITS), 4))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"width": 5, "candidates": 4}, "width must be at most candidates, 4, not 5"),
        ({"candidates": 41}, r"candidates must be an integer in 1\.\.40"),
        ({"candidates": 0}, "candidates must be an integer"),
    ],
)
def test_bad_numbers_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        build_tree(LOGITS, ROOTS, budget=16, **settings)
