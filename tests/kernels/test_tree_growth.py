"""tree_growth against a heap, bit for bit."""

import heapq
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_growth import Growth, api, pallas_triton, tree_growth
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

# Sequences, levels, candidates, nodes: buckets of a decoder at JetSpec's width and depth, sizes that are no
# powers of two, one candidate only, and more nodes than one warp takes.
SIZES = [
    (3, 4, 3, 16),
    (3, 15, 7, 128),
    (2, 40, 1, 37),
]
MORE_SIZES = [(2, 1, 40, 33), (1, 6, 9, 512)]
SEEDS = range(8)


@dataclass(frozen=True)
class Case:
    log_probs: np.ndarray
    fan_out: np.ndarray
    budget: np.ndarray
    num_nodes: int


def log_softmax_case(rng, batch, levels, width, num_nodes):
    """What a draft head gives: rows of log-probabilities, best first, every budget full width."""
    logits = rng.normal(scale=3, size=(batch, levels, width + 20)).astype(np.float32)
    rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    log_probs = -np.sort(-rows, axis=-1)[..., :width]
    fan_out = np.full((batch, levels), width, np.int32)
    return Case(log_probs, fan_out, np.full(batch, num_nodes, np.int32), num_nodes)


def rough_case(rng, batch, levels, width, num_nodes):
    """Ties everywhere, impossible and undefined candidates, caps and budgets in and out of range."""
    log_probs = -rng.integers(0, 4, (batch, levels, width)).astype(np.float32) / 2
    for value in (-np.inf, np.nan, -0.0, np.inf):
        log_probs[rng.random(log_probs.shape) < 0.03] = value
    fan_out = rng.integers(-1, width + 3, (batch, levels)).astype(np.int32)
    fan_out[:, 0] |= 1
    budget = rng.integers(-1, num_nodes + 9, batch).astype(np.int32)
    return Case(log_probs, fan_out, budget, num_nodes)


def heap_growth(log_probs, children, fan_out, budget, num_nodes, *, one_by_one):
    """The definition for one sequence, in float32: expand the best node, or append the best child."""
    levels, candidates, width = log_probs.shape
    nodes, heap = [(-1, 0, 0, np.float32(0))], []

    def child(node, place):
        """A node's child in a place of its row; None where it may have none."""
        _, own, depth, score = nodes[node]
        if depth == levels or place >= min(max(fan_out[depth], 0), width):
            return None
        candidate = min(max(children[depth, own, place], 0), candidates - 1)
        with np.errstate(invalid="ignore"):
            return node, candidate, depth + 1, score + log_probs[depth, own, place]

    def offer(node, place):
        found = child(node, place)
        if found is not None and found[3] > -np.inf:
            heapq.heappush(heap, (-found[3], node, place))

    room = min(budget, num_nodes)
    if one_by_one:
        offer(0, 0)
        while heap and len(nodes) < room:
            _, node, place = heapq.heappop(heap)
            nodes.append(child(node, place))
            offer(node, place + 1)
            offer(len(nodes) - 1, 0)
    else:
        heap.append((np.float32(0), 0))
        while heap:
            _, node = heapq.heappop(heap)
            for place in range(width):
                found = child(node, place)
                if found is None or len(nodes) >= room:
                    break
                if found[3] > -np.inf:
                    heapq.heappush(heap, (-found[3], len(nodes)))
                nodes.append(found)
    padding = [(-1, 0, 0, np.float32(-np.inf))] * (num_nodes - len(nodes))
    return *zip(*nodes, *padding, strict=True), len(nodes)


def assert_same(growth, expected):
    assert [x.dtype for x in growth] == ["int32", "int32", "int32", "float32", "int32"]
    for name, actual, wanted in zip(Growth._fields, growth, expected, strict=True):
        np.testing.assert_array_equal(actual, wanted, err_msg=name)


class TreeGrowthSuite:
    implementation: str
    one_by_one = False

    @classmethod
    @cache
    def jitted(cls, num_nodes):
        grow = partial(tree_growth, num_nodes=num_nodes, one_by_one=cls.one_by_one)
        return jax.jit(partial(grow, implementation=cls.implementation))

    def run(self, case):
        """The jitted operation on a case, back on the host."""
        grow = self.jitted(case.num_nodes)
        return jax.tree.map(np.asarray, grow(case.log_probs, case.fan_out, case.budget))

    def oracle(self, case):
        # All parents of a level have one row, and a child's candidate is its place in it.
        rows = np.repeat(case.log_probs[:, :, None], case.log_probs.shape[2], axis=2)
        places = np.broadcast_to(np.arange(rows.shape[3]), rows.shape)
        sequences = zip(rows, places, case.fan_out, case.budget, strict=True)
        grown = [heap_growth(*own, case.num_nodes, one_by_one=self.one_by_one) for own in sequences]
        return Growth(*(np.array(column) for column in zip(*grown, strict=True)))

    def check(self, case):
        assert_same(self.run(case), self.oracle(case))

    @pytest.mark.parametrize("make", [log_softmax_case, rough_case])
    @pytest.mark.parametrize("size", [*SIZES, *map(wide, MORE_SIZES)], ids=str)
    def test_is_the_heap(self, size, make):
        for seed in SEEDS:
            self.check(make(np.random.default_rng(seed), *size))

    def test_every_budget(self):
        case = log_softmax_case(np.random.default_rng(0), 3, 15, 7, 128)
        for first in range(-1, 130, 3):
            self.check(replace(case, budget=np.arange(first, first + 3, dtype=np.int32)))

    def test_a_chain_to_the_last_level(self):
        case = log_softmax_case(np.random.default_rng(0), 2, 40, 1, 37)
        assert self.run(case).depths[0].tolist() == list(range(37))

    def test_no_child_anywhere(self):
        case = rough_case(np.random.default_rng(0), 3, 4, 3, 16)
        growth = self.run(replace(case, fan_out=np.zeros_like(case.fan_out)))
        assert growth.num_nodes.tolist() == [1, 1, 1]
        assert_same(growth, jax.tree.map(np.asarray, self.run(replace(case, budget=case.budget * 0))))

    @pytest.mark.parametrize(("levels", "width", "num_nodes"), [(4, 3, 1), (0, 3, 16), (4, 0, 16)])
    def test_nothing_to_grow_from(self, levels, width, num_nodes):
        log_probs, fan_out = np.zeros((2, levels, width), np.float32), np.ones((2, levels), np.int32)
        case = Case(log_probs, fan_out, np.full(2, 16, np.int32), num_nodes)
        growth = self.run(case)
        assert growth.num_nodes.tolist() == [1, 1]
        assert growth.scores.tolist() == [[0.0] + [-np.inf] * (num_nodes - 1)] * 2

    def test_batch_equals_alone(self):
        case = rough_case(np.random.default_rng(3), 3, 15, 7, 128)
        together = self.run(case)
        for b in range(3):
            one = slice(b, b + 1)
            alone = Case(case.log_probs[one], case.fan_out[one], case.budget[one], 128)
            assert_same(self.run(alone), (x[one] for x in together))

    def test_second_call_has_the_same_bits(self):
        case = log_softmax_case(np.random.default_rng(0), 3, 15, 7, 128)
        assert_same(self.run(case), self.run(case))


class SiblingsSuite(TreeGrowthSuite):
    def test_the_drawn_example(self):
        growth = self.run(
            Case(
                log_probs=np.array([[[-0.5, -1.0], [-0.25, -2.0]]], np.float32),
                fan_out=np.array([[2, 2]], np.int32),
                budget=np.array([5], np.int32),
                num_nodes=5,
            )
        )
        assert growth.parents.tolist() == [[-1, 0, 0, 1, 1]]
        assert growth.ranks.tolist() == [[0, 0, 1, 0, 1]]
        assert growth.depths.tolist() == [[0, 1, 1, 2, 2]]
        assert growth.scores.tolist() == [[0.0, -0.5, -1.0, -0.75, -2.5]]
        assert growth.num_nodes.tolist() == [5]

    def test_equal_scores_grow_in_order(self):
        """Certain candidates, whose scores are all zero: the tree is full level by level."""
        case = log_softmax_case(np.random.default_rng(0), 3, 15, 7, 128)
        case = replace(case, log_probs=np.zeros_like(case.log_probs))
        growth = self.run(case)
        np.testing.assert_array_equal(growth.parents[0, 1:], np.arange(127) // 7)
        assert_same(growth, self.oracle(case))


class OneByOneSuite(TreeGrowthSuite):
    one_by_one = True

    def test_the_best_nodes_of_all(self):
        """Brute force: every path of the full tree, of which the most probable are the tree."""
        for seed in SEEDS:
            case = log_softmax_case(np.random.default_rng(seed), 1, 5, 4, 33)
            growth = self.run(case)
            scores = [np.zeros(1)]
            for row in case.log_probs[0].astype(np.float64):
                scores.append((scores[-1][:, None] + row[None, :]).ravel())
            best = -np.sort(-np.concatenate(scores))[:33]
            np.testing.assert_allclose(-np.sort(-growth.scores[0]), best, rtol=1e-5, atol=1e-5)


class Interpreted:
    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        stand_in(api, partial(pallas_triton.tree_growth, interpret=True))


class TestXla(SiblingsSuite):
    implementation = "xla"


class TestXlaOneByOne(OneByOneSuite):
    implementation = "xla"


class TestPallasTritonInterpreted(Interpreted, SiblingsSuite):
    pass


class TestPallasTritonInterpretedOneByOne(Interpreted, OneByOneSuite):
    pass


@pytest.mark.parametrize("one_by_one", [False, True], ids=["siblings", "one_by_one"])
@pytest.mark.parametrize(
    "size", [SIZES[1], MORE_SIZES[-1], wide(MORE_SIZES[0]), wide((1, 15, 7, 256))], ids=str
)
def test_lowers_for_cuda(size, one_by_one):
    batch, levels, width, num_nodes = size
    arrays = (
        jax.ShapeDtypeStruct((batch, levels, width), jnp.float32),
        jax.ShapeDtypeStruct((batch, levels + 1), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
    )
    grow = partial(pallas_triton.tree_growth, num_nodes=num_nodes, one_by_one=one_by_one)
    assert lower_for_gpu(grow, *arrays).count(KERNEL) == 1


class TestUnsupportedShape:
    @pytest.mark.parametrize(
        ("levels", "num_nodes", "reason"),
        [
            (15, 1024, None),
            (15, 1025, "1025 nodes are more than 1024"),
            (2**21 - 1, 1024, None),
            (2**21, 1024, "1024 nodes and 2097152 levels do not fit into one number"),
        ],
    )
    def test_what_the_kernel_does_not_do(self, levels, num_nodes, reason):
        assert pallas_triton.unsupported(jnp.zeros((1, levels, 1)), num_nodes=num_nodes) == reason

    def test_one_by_one_a_place_holds_a_rank_too(self):
        unsupported = partial(pallas_triton.unsupported, one_by_one=True)
        assert unsupported(jnp.zeros((1, 15, 7)), num_nodes=256) is None
        problem = unsupported(jnp.zeros((1, 15, 151936)), num_nodes=1024)
        assert problem == "1024 nodes and 15 levels and a width of 151936 do not fit into one number"


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"log_probs": jnp.zeros((4, 3))}, r"log_probs must be \[B, D, W\], got \(4, 3\)"),
            ({"fan_out": jnp.zeros((2, 5), jnp.int32)}, r"fan_out is \(2, 5\), expected \(2, 4\)"),
            ({"budget": jnp.zeros(3, jnp.int32)}, r"budget is \(3,\), expected \(2,\)"),
            ({"num_nodes": -1, "budget": jnp.zeros(2)}, "num_nodes is -1.*budget holds float32"),
        ],
    )
    def test_refused(self, changes, message):
        good = {
            "log_probs": jnp.zeros((2, 4, 3)),
            "fan_out": jnp.zeros((2, 4), jnp.int32),
            "budget": jnp.zeros(2, jnp.int32),
            "num_nodes": 16,
        }
        with pytest.raises(ValueError, match=message):
            tree_growth(**good | changes)
