"""tree_growth where every candidate has a row of its own for its children, against a heap, bit for bit."""

from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_growth import Growth, pallas_triton, tree_growth
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.kernels.test_tree_growth import Interpreted, assert_same, heap_growth
from tests.marks import wide

# Sequences, levels, candidates, most children, nodes: a decoder's depth with 16 candidates, fewer children
# than candidates, one candidate only, and more nodes than one warp takes.
SIZES = [(2, 4, 5, 3, 16), (2, 15, 16, 16, 128)]
MORE_SIZES = [(3, 3, 1, 1, 5), (1, 6, 9, 9, 512)]
SEEDS = range(4)


@dataclass(frozen=True)
class Case:
    log_probs: np.ndarray
    children: np.ndarray
    fan_out: np.ndarray
    budget: np.ndarray
    num_nodes: int


def sorted_case(rng, batch, levels, candidates, width, num_nodes):
    """What a selector gives: for each parent the candidates of the next level, best first."""
    logits = rng.normal(scale=3, size=(batch, levels, candidates, candidates)).astype(np.float32)
    rows = logits - np.log(np.exp(logits).sum(-1, keepdims=True) + 1)
    children = np.argsort(-rows, axis=-1, kind="stable")[..., :width]
    log_probs = np.take_along_axis(rows, children, axis=-1)
    fan_out = np.full((batch, levels), width, np.int32)
    return Case(log_probs, children.astype(np.int32), fan_out, np.full(batch, num_nodes, np.int32), num_nodes)


def rough_case(rng, batch, levels, candidates, width, num_nodes):
    """Ties, impossible and undefined entries, and caps, budgets and candidates in and out of range."""
    shape = (batch, levels, candidates, width)
    log_probs = -rng.integers(0, 4, shape).astype(np.float32) / 2
    for value in (-np.inf, np.nan, -0.0, np.inf):
        log_probs[rng.random(shape) < 0.03] = value
    children = rng.integers(-1, candidates + 2, shape).astype(np.int32)
    fan_out = rng.integers(-1, width + 3, (batch, levels)).astype(np.int32)
    fan_out[:, 0] |= 1
    return Case(
        log_probs, children, fan_out, rng.integers(-1, num_nodes + 9, batch).astype(np.int32), num_nodes
    )


class ByParentSuite:
    implementation: str
    one_by_one = False

    @classmethod
    @cache
    def jitted(cls, num_nodes):
        grow = partial(tree_growth, num_nodes=num_nodes, one_by_one=cls.one_by_one)
        return jax.jit(partial(grow, implementation=cls.implementation))

    def run(self, case):
        grow = self.jitted(case.num_nodes)
        growth = grow(case.log_probs, case.fan_out, case.budget, children=case.children)
        return jax.tree.map(np.asarray, growth)

    def oracle(self, case):
        sequences = zip(case.log_probs, case.children, case.fan_out, case.budget, strict=True)
        grown = [heap_growth(*own, case.num_nodes, one_by_one=self.one_by_one) for own in sequences]
        return Growth(*(np.array(column) for column in zip(*grown, strict=True)))

    @pytest.mark.parametrize("make", [sorted_case, rough_case])
    @pytest.mark.parametrize("size", [*SIZES, *map(wide, MORE_SIZES)], ids=str)
    def test_is_the_heap(self, size, make):
        for seed in SEEDS:
            case = make(np.random.default_rng(seed), *size)
            assert_same(self.run(case), self.oracle(case))

    @pytest.mark.parametrize("levels", [4, 15])
    def test_one_row_for_all_parents_gives_the_tree_of_shared_rows(self, levels):
        size = next(size for size in SIZES if size[1] == levels)
        *_, width, num_nodes = size
        case = rough_case(np.random.default_rng(0), *size)
        rows = case.log_probs[:, :, :1]
        places = np.broadcast_to(np.arange(width, dtype=np.int32), case.children.shape)
        same = replace(case, log_probs=np.broadcast_to(rows, case.log_probs.shape), children=places)
        shared = self.jitted(num_nodes)(rows[:, :, 0], case.fan_out, case.budget)
        assert_same(self.run(same), shared)

    def test_the_drawn_example(self):
        """Both levels are sorted for each parent; the second candidate prefers another child."""
        after_root, others = [[-0.5, -1.0], [0.0, 0.0]], [[-0.25, -2.0], [-0.125, -4.0]]
        case = Case(
            log_probs=np.array([[after_root, others]], np.float32),
            children=np.array([[[[0, 1], [0, 1]], [[0, 1], [1, 0]]]], np.int32),
            fan_out=np.array([[2, 2]], np.int32),
            budget=np.array([5], np.int32),
            num_nodes=5,
        )
        growth = self.run(case)
        one_by_one = [[-1, 0, 1, 0, 3], [0, 0, 0, 1, 1], [0, 1, 2, 1, 2], [0.0, -0.5, -0.75, -1.0, -1.125]]
        siblings = [[-1, 0, 0, 1, 1], [0, 0, 1, 0, 1], [0, 1, 1, 2, 2], [0.0, -0.5, -1.0, -0.75, -2.5]]
        expected = one_by_one if self.one_by_one else siblings
        assert [column[0].tolist() for column in growth[:4]] == expected

    def test_second_call_has_the_same_bits(self):
        case = sorted_case(np.random.default_rng(0), *SIZES[1])
        assert_same(self.run(case), self.run(case))


class TestXla(ByParentSuite):
    implementation = "xla"


class TestXlaOneByOne(ByParentSuite):
    implementation = "xla"
    one_by_one = True


class TestPallasTritonInterpreted(Interpreted, ByParentSuite):
    pass


class TestPallasTritonInterpretedOneByOne(Interpreted, ByParentSuite):
    one_by_one = True


@pytest.mark.parametrize("one_by_one", [False, True], ids=["siblings", "one_by_one"])
@pytest.mark.parametrize("size", [SIZES[1], wide(MORE_SIZES[1]), wide((2, 15, 32, 7, 256))], ids=str)
def test_lowers_for_cuda(size, one_by_one):
    batch, levels, candidates, width, num_nodes = size
    table = (batch, levels, candidates, width)

    def grow(log_probs, fan_out, budget, children):
        shape = {"num_nodes": num_nodes, "one_by_one": one_by_one}
        return pallas_triton.tree_growth(log_probs, fan_out, budget, children=children, **shape)

    arrays = (
        jax.ShapeDtypeStruct(table, jnp.float32),
        jax.ShapeDtypeStruct((batch, levels + 1), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        jax.ShapeDtypeStruct(table, jnp.int32),
    )
    assert lower_for_gpu(grow, *arrays).count(KERNEL) == 1


def test_a_place_holds_a_candidate_too():
    unsupported = partial(pallas_triton.unsupported, num_nodes=256, one_by_one=True)
    assert unsupported(jnp.zeros((1, 15, 16, 16))) is None
    assert unsupported(jnp.zeros((1, 255, 128, 128))) is None
    problem = unsupported(jnp.zeros((1, 255, 129, 129)))
    assert (
        problem == "256 nodes and 255 levels and a width of 129 and 129 candidates do not fit into one number"
    )


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            (
                {"log_probs": jnp.zeros((2, 4, 3))},
                r"must be \[B, D, K, W\] where children are given, got \(2, 4",
            ),
            ({"children": None}, r"log_probs must be \[B, D, W\], got \(2, 4, 5, 3\)"),
            ({"children": jnp.zeros((2, 4, 5, 3))}, "children holds float32, expected int32"),
        ],
    )
    def test_refused(self, changes, message):
        good = {
            "log_probs": jnp.zeros((2, 4, 5, 3)),
            "fan_out": jnp.zeros((2, 4), jnp.int32),
            "budget": jnp.zeros(2, jnp.int32),
            "children": jnp.zeros((2, 4, 5, 3), jnp.int32),
            "num_nodes": 16,
        }
        with pytest.raises(ValueError, match=message):
            tree_growth(**good | changes)
