import dataclasses
import heapq

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
    Candidates,
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


def best_first(tokens, log_probs, root, caps, budget, max_depth):
    """The method as a plain heap: pop the best, append its children, stop at the budget."""
    nodes, heap = [(root, NO_PARENT, 0, 0.0)], [(0.0, 0)]
    while heap and len(nodes) < budget:
        cost, node = heapq.heappop(heap)
        depth = nodes[node][2]
        if depth >= min(max_depth, len(tokens)):
            continue
        for rank in range(caps[depth]):
            if len(nodes) < budget:
                score = log_probs[depth][rank] - cost
                heapq.heappush(heap, (-score, len(nodes)))
                nodes.append((tokens[depth][rank], node, depth + 1, score))
    return nodes


def random_logits(*shape, seed=0):
    return np.random.default_rng(seed).normal(scale=3.0, size=shape).astype(np.float32)


@pytest.fixture(scope="module")
def candidates():
    return top_candidates(jnp.asarray(random_logits(6, 7, 40)), 3)


def random_batch(seed, batch=3, depth=4, width=3):
    """Arguments of `grow_tree` with whole-number scores: sums are exact and ties are common."""
    rng = np.random.default_rng(seed)
    return (
        rng.permuted(np.broadcast_to(np.arange(10), (batch, depth, 10)), axis=-1)[..., :width],
        -np.sort(rng.integers(0, rng.integers(1, 6), (batch, depth, width)), axis=-1),
        rng.integers(10, size=batch),
        rng.integers(width + 1, size=(batch, depth)),
        rng.integers(1, 17, size=batch),
        rng.integers(depth + 2, size=batch),
    )


class TestGrow:
    @pytest.mark.parametrize("seed", range(60))
    def test_is_the_heap(self, seed):
        tokens, log_probs, *rest = batch = random_batch(seed)
        log_probs = jnp.asarray(log_probs, jnp.float32)
        candidates = Candidates(jnp.asarray(tokens, jnp.int32), log_probs, log_probs[:, :, 0])
        tree = grow(candidates, *rest, num_nodes=16)
        for b in range(len(tokens)):
            nodes = nodes_of(tree, b)
            assert nodes == best_first(*(x[b].tolist() for x in batch))
            # Stated apart from the oracle: the limits, the order, distinct siblings.
            caps, budget, max_depth = (x[b] for x in rest[1:])
            assert len(nodes) <= budget
            siblings = [node[:2] for node in nodes]
            assert len(set(siblings)) == len(siblings)
            for index, (_, parent, depth, _) in enumerate(nodes):
                assert depth <= max_depth
                assert parent < index
                children = sum(p == index for _, p, _, _ in nodes)
                assert children <= (caps[depth] if depth < len(caps) else 0)

    def test_a_neighbour_changes_nothing(self, candidates):
        roots = jnp.arange(6)
        caps = np.random.default_rng(2).integers(0, 4, (6, 7))
        caps[:, 0] = 3
        budget, max_depth = [1, 2, 16, 32, 999, -3], [7, 1, 2, 7, 99, 7]
        together = grow(candidates, roots, caps, budget, max_depth, 32)
        for b in range(6):
            one = slice(b, b + 1)
            alone = grow(
                jax.tree.map(lambda x, one=one: x[one], candidates),
                roots[one], caps[one], budget[one], max_depth[one], 32,
            )  # fmt: skip
            jax.tree.map(lambda x, y, b=b: np.testing.assert_array_equal(x[b], y[0]), together, alone)

    def test_budget_and_depth_are_per_sequence(self, candidates):
        full = np.full((6, 7), 3)
        tree = grow(candidates, np.zeros(6), full, [0, 1, 5, 32, 999, 32], [7, 7, 7, 2, 1, 0], 32)
        assert tree.num_nodes.tolist() == [1, 1, 5, 13, 4, 1]
        assert tree.depths.max(axis=1)[3:].tolist() == [2, 1, 0]

    def test_caps_of_zero_stop_growth(self, candidates):
        caps = np.full((6, 7), 3)
        caps[:, 1] = 0
        tree = grow(candidates, np.zeros(6), caps, [32] * 6, [7] * 6, 32)
        assert tree.num_nodes.tolist() == [4] * 6

    def test_nan_stays_in_its_sequence(self, candidates):
        caps, budget, depth = np.full((6, 7), 3), [32] * 6, [7] * 6
        clean = grow(candidates, np.zeros(6), caps, budget, depth, 32)
        poisoned = dataclasses.replace(candidates, log_probs=candidates.log_probs.at[2].set(jnp.nan))
        tree = grow(poisoned, np.zeros(6), caps, budget, depth, 32)
        for b in (0, 1, 3, 4, 5):
            assert nodes_of(tree, b) == nodes_of(clean, b)

    def test_impossible_tokens_are_never_expanded(self):
        logits = jnp.full((1, 3, 8), -jnp.inf).at[:, :, 4].set(0.0)
        tree = grow(top_candidates(logits, 2), [0], np.full((1, 3), 2), [16], [3], 16)
        nodes = nodes_of(tree, 0)
        assert len(nodes) == 7
        assert {nodes[parent][0] for _, parent, depth, _ in nodes if depth > 1} == {4}


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
