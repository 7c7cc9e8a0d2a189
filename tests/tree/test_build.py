import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError

from jetspec_jax.tree import (
    BUCKETS,
    NO_PARENT,
    AccumLogp,
    Algorithm,
    Plan,
    TokenTree,
    bucket_for,
    build_tree,
    grow_tree,
    top_candidates,
)


def grow(candidates, roots, caps, budget, max_depth, num_nodes):
    roots, caps, *limits = (jnp.asarray(value, jnp.int32) for value in (roots, caps, budget, max_depth))
    return _grow(candidates, roots, Plan(caps), *limits, num_nodes=num_nodes)


_grow = jax.jit(grow_tree, static_argnames="num_nodes")


def nodes_of(tree, b):
    """The valid nodes of sequence b as (token, parent, depth, score), padding checked."""
    rows = [np.asarray(x[b]) for x in (tree.tokens, tree.parents, tree.depths, tree.scores)]
    n = int(tree.num_nodes[b])
    for row, fill in zip(rows, (0, NO_PARENT, 0, -np.inf), strict=True):
        assert (row[n:] == fill).all()
    return [tuple(node) for node in zip(*(row[:n].tolist() for row in rows), strict=True)]


def random_logits(*shape, seed=0):
    return np.random.default_rng(seed).normal(scale=3.0, size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def candidates():
    return top_candidates(jnp.asarray(random_logits(6, 7, 40)), 3)


class TestGrow:
    def test_budget_and_depth_are_per_sequence(self, candidates):
        full = np.full((6, 7), 3)
        tree = grow(candidates, np.zeros(6), full, [0, 1, 5, 32, 999, 32], [7, 7, 7, 2, 1, 0], 32)
        assert tree.num_nodes.tolist() == [1, 1, 5, 13, 4, 1]
        assert tree.depths.max(axis=1)[3:].tolist() == [2, 1, 0]


class TestBuild:
    def test_types(self):
        tree = build_tree(random_logits(2, 4, 9), np.array([3, 4]), width=2, budget=10)
        assert [x.dtype for x in jax.tree.leaves(tree)] == ["int32"] * 3 + ["float32", "int32"]
        assert [x.shape for x in jax.tree.leaves(tree)] == [(2, 16)] * 4 + [(2,)]
        assert tree.valid.sum(axis=1).tolist() == tree.num_nodes.tolist() == [10, 10]
        assert isinstance(jax.eval_shape(lambda tree: tree, tree), TokenTree)

    def test_width_one_is_the_greedy_chain(self):
        logits = random_logits(1, 6, 30)
        tree = build_tree(logits, np.array([2]), width=1, budget=64)
        assert tree.num_nodes.tolist() == [7]
        assert tree.parents[0, :7].tolist() == list(range(-1, 6))
        assert tree.tokens[0, :7].tolist() == [2, *logits[0].argmax(-1).tolist()]

    def test_a_smaller_budget_is_a_prefix(self):
        logits, root = random_logits(1, 8, 30), np.array([1])
        largest = nodes_of(build_tree(logits, root, width=3, budget=256), 0)
        for budget in (1, 2, 15, 16, 17, 255):
            smaller = nodes_of(build_tree(logits, root, width=3, budget=budget), 0)
            assert smaller == largest[:budget]

    def test_depth_limit(self):
        logits, root = random_logits(1, 8, 30), np.array([1])
        tree = build_tree(logits, root, width=3, budget=64, depth=2)
        cut = build_tree(logits[:, :2], root, width=3, budget=64)
        assert nodes_of(tree, 0) == nodes_of(cut, 0)
        assert tree.num_nodes.tolist() == [13]

    def test_compiles_once_per_bucket_width_and_algorithm(self):
        traces = []

        @dataclasses.dataclass(frozen=True)
        class Counted(Algorithm):
            option: int = 0

            def plan(self, candidates, routing):
                traces.append(candidates.tokens.shape)
                return AccumLogp().plan(candidates, routing)

        logits, root = random_logits(1, 5, 30), np.array([1])
        for budget in range(17, 33):
            for depth in (None, 1, np.int32(4)):
                build_tree(logits, root, width=3, budget=budget, depth=depth, algorithm=Counted())
        assert len(traces) == 1
        build_tree(logits, root, width=3, budget=33, algorithm=Counted())
        build_tree(logits, root, width=2, budget=32, algorithm=Counted())
        build_tree(logits, root, width=2, budget=32, algorithm=Counted(1))
        assert len(traces) == 4


class TestArguments:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"width": 0}, r"width must be an integer in 1\.\.30"),
            ({"width": 31}, r"width must be an integer in 1\.\.30.*got 31"),
            ({"budget": 257}, r"budget must be an integer in 1\.\.256.*got 257"),
            ({"depth": 6}, r"depth must be an integer in 1\.\.5.*got 6"),
            ({"draft_logits": np.zeros((5, 30), np.float32)}, r"\[B, D, V\], .* \[5, 30\]"),
            ({"draft_logits": np.zeros((2, 5, 30), np.int32)}, r"floating .* int32 \[2, 5, 30\]"),
            ({"draft_logits": np.zeros((2, 0, 30), np.float32)}, "at least one row"),
            ({"root_tokens": np.zeros(3, np.int32)}, r"must be integer \[2\], .* \[3\]"),
            ({"root_tokens": np.zeros(2, np.float32)}, r"integer \[2\], got float32 \[2\]"),
        ],
    )
    def test_refused(self, changes, message):
        good = {"draft_logits": random_logits(2, 5, 30), "root_tokens": np.zeros(2, np.int32)}
        arguments = {**good, "width": 3, "budget": 16, **changes}
        with pytest.raises(ValueError, match=message):
            build_tree(**arguments)

    @pytest.mark.parametrize("name", ["width", "budget", "depth"])
    def test_a_fraction_is_refused(self, name):
        # By the typing hook, or by the function itself where no hook is installed.
        arguments = {"width": 3, "budget": 16, name: 2.5}
        with pytest.raises((ValueError, TypeCheckError), match=name):
            build_tree(random_logits(1, 5, 30), np.array([1]), **arguments)

    def test_numpy_integers_are_integers(self):
        logits, root = random_logits(1, 5, 30), np.array([1])
        tree = build_tree(logits, root, width=np.int64(3), budget=np.int32(16))
        assert tree.num_nodes.tolist() == [16]

    def test_bucket_for(self):
        assert [bucket_for(b) for b in BUCKETS] == list(BUCKETS)
        assert [bucket_for(b) for b in (3, 5, 9, 17, 33, 65, 129)] == [4, 8, 16, 32, 64, 128, 256]
        for budget in (-1, 0, 257):
            with pytest.raises(ValueError, match=r"1\.\.256"):
                bucket_for(budget)
