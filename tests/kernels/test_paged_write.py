"""paged_write against a NumPy loop over rows, bit for bit."""

from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_write import api, paged_write, pallas_triton
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

PAGES, PAGE = 6, 4
SLOTS = PAGES * PAGE
LOWEST, HIGHEST = np.iinfo(np.int32).min, np.iinfo(np.int32).max
# Row shapes and dtypes of the pools of one call: a model's layers, two geometries, sizes of no power of two.
GEOMETRIES = {
    "layers": [((2, 8), np.float32)] * 4,
    "mixed": [((2, 8), jnp.bfloat16), ((4, 4), np.float32), ((8,), np.float16)],
    "odd": [((3, 5), np.float32), ((7,), jnp.bfloat16), ((1,), np.float32), ((), np.float32)],
}


@dataclass(frozen=True)
class Case:
    pools: list[np.ndarray]
    blocks: list[np.ndarray]
    nodes: np.ndarray
    slots: np.ndarray

    def args(self):
        return jax.tree.map(jnp.asarray, (self.pools, self.blocks, self.nodes, self.slots))


def make_case(geometry, batch=2, num_nodes=9, rows=5, seed=0):
    """Rows from anywhere in the blocks to anywhere in the pools, some of them to nowhere or from nowhere."""
    rng = np.random.default_rng(seed)

    def normal(shape, dtype):
        return rng.standard_normal(shape).astype(dtype)

    slots = rng.permutation(SLOTS)
    committed, slots = slots[:3], slots[3 : 3 + batch * rows].reshape(batch, rows).astype(np.int32)
    nodes = rng.integers(num_nodes, size=(batch, rows), dtype=np.int32)
    for array, end in ((slots, SLOTS), (nodes, num_nodes)):
        outside = rng.random(array.shape) < 0.2
        array[outside] = rng.choice([-1, -end, end, LOWEST, HIGHEST], outside.sum())
    pools = [np.full((SLOTS, *row), np.nan, dtype) for row, dtype in geometry]
    for pool in pools:
        pool[committed] = normal(pool[committed].shape, pool.dtype)
    pools = [pool.reshape(PAGES, PAGE, *pool.shape[1:]) for pool in pools]
    blocks = [normal((batch, num_nodes, *row), dtype) for row, dtype in geometry]
    return Case(pools, blocks, nodes, slots)


def oracle(case):
    pools = [pool.copy() for pool in case.pools]
    for pool, block in zip(pools, case.blocks, strict=True):
        for b, r in np.ndindex(case.nodes.shape):
            node, slot = case.nodes[b, r], case.slots[b, r]
            if 0 <= node < block.shape[1] and 0 <= slot < SLOTS:
                pool[slot // PAGE, slot % PAGE] = block[b, node]
    return pools


def assert_same_bits(left, right):
    for one, other in zip(left, right, strict=True):
        assert one.shape == other.shape
        assert one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


class PagedWriteSuite:
    implementation: str

    def write(self, *args):
        return paged_write(*args, implementation=self.implementation)

    @classmethod
    @cache
    def jitted(cls):
        return jax.jit(cls().write)

    def check(self, case, expected=None):
        assert_same_bits(self.jitted()(*case.args()), oracle(case) if expected is None else expected)

    @pytest.mark.parametrize(("geometry", "batch"), [("layers", 3), ("mixed", 2), ("odd", 2)])
    def test_oracle(self, geometry, batch):
        for seed in range(5):
            self.check(make_case(GEOMETRIES[geometry], batch, seed=seed))

    @pytest.mark.parametrize(("num_nodes", "rows"), [(1, 1), (1, 4), (16, 3), (20, 20)])
    def test_sizes(self, num_nodes, rows):
        self.check(make_case(GEOMETRIES["mixed"], 1, num_nodes, rows))

    def test_example(self):
        pool = np.full((4, 2), -1, np.int32)
        block = np.arange(4, dtype=np.int32)[None]
        nodes, slots = np.asarray([[0, 2, -1]], np.int32), np.asarray([[7, 2, 3]], np.int32)
        (pool,) = self.jitted()([pool], [block], nodes, slots)
        np.testing.assert_array_equal(pool, [[-1, -1], [2, -1], [-1, -1], [-1, 0]])

    @pytest.mark.parametrize("slot", [-1, SLOTS, LOWEST, HIGHEST])
    def test_nothing_to_write(self, slot):
        case = make_case(GEOMETRIES["odd"])
        case.slots[:] = slot
        self.check(case, case.pools)

    def test_no_such_node(self):
        case = make_case(GEOMETRIES["odd"])
        case.nodes[:] = -1
        self.check(case, case.pools)

    def test_in_a_loop(self):
        case = make_case(GEOMETRIES["layers"], 2, num_nodes=9, rows=9)
        pools, blocks, nodes, slots = case.args()

        @partial(jax.jit, donate_argnums=0)
        def run(pools):
            def step(i, pools):
                now = jnp.arange(9)[None, :] // 3 == i
                return self.write(pools, blocks, nodes, jnp.where(now, slots, -1))

            return jax.lax.fori_loop(0, 3, step, tuple(pools))

        assert_same_bits(run(pools), oracle(case))


class TestXla(PagedWriteSuite):
    implementation = "xla"

    @pytest.mark.parametrize("dtype", [np.int8, np.int32, np.bool_])
    def test_other_dtypes(self, dtype):
        case = make_case([((3, 5), np.float32)])
        pools, blocks = ([np.nan_to_num(x).astype(dtype) for x in part] for part in (case.pools, case.blocks))
        self.check(Case(pools, blocks, case.nodes, case.slots))


class TestPallasTritonInterpreted(PagedWriteSuite):
    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        stand_in(api, partial(pallas_triton.paged_write, interpret=True))

    @pytest.mark.parametrize(("per_call", "per_program"), [wide(128, 1), (128, 3), (4, 2), wide(1, 8)])
    def test_many_pools(self, monkeypatch, per_call, per_program):
        monkeypatch.setattr(pallas_triton, "_POOLS_PER_CALL", per_call)
        monkeypatch.setattr(pallas_triton, "_POOLS_PER_PROGRAM", per_program)
        case = make_case(GEOMETRIES["mixed"] * 3)
        assert_same_bits(jax.jit(self.write)(*case.args()), oracle(case))


@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_lowers_for_cuda(geometry):
    """To one kernel whose pools are inputs and outputs at once, on a machine without a GPU too."""
    case = make_case(geometry)
    text = lower_for_gpu(pallas_triton.paged_write, *case.args())
    assert text.count(KERNEL) == 1
    assert text.count("stablehlo.output_operand_alias") == len(case.pools)


@pytest.mark.parametrize(
    ("pages", "dtype", "reason"),
    [
        (640, jnp.bfloat16, "None"),
        (640, jnp.int8, "pools[1] holds int8"),
        (32768, jnp.bfloat16, "pools[1] has 2147483648 elements"),
    ],
)
def test_unsupported_shape(pages, dtype, reason):
    reasons = []

    def ask(*pools):
        reasons.append(str(pallas_triton.unsupported(pools)))

    good = jax.ShapeDtypeStruct((640, 64, 8, 128), jnp.float32)
    jax.eval_shape(ask, good, jax.ShapeDtypeStruct((pages, 64, 8, 128), dtype))
    assert reasons[0].startswith(reason)


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.fixture
    def call(self):
        names = ("pools", "blocks", "nodes", "slots")
        case = make_case(GEOMETRIES["layers"])
        return dict(zip(names, (case.pools, case.blocks, case.nodes, case.slots), strict=True))

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("pools", lambda x: [], "0 pools and 4 blocks"),
            ("blocks", lambda x: x[1:], "4 pools and 3 blocks"),
            ("pools", lambda x: [x[0][0, 0, 0], *x[1:]], r"pools must be \[P, page, ...\]"),
            ("nodes", lambda x: x[0], r"nodes \[B, R\]"),
            ("slots", lambda x: x.astype(jnp.int16), "slots holds int16, expected int32"),
            ("blocks", lambda x: [*x[:3], x[3][:, 1:]], r"blocks\[3\] is \(2, 8, 2, 8\), expected"),
            ("nodes", lambda x: x[:, :0], r"nodes is \(2, 0\): no elements"),
        ],
    )
    def test_arrays(self, call, name, change, message):
        with pytest.raises(ValueError, match=message):
            paged_write(**call | {name: change(call[name])})

    def test_too_many_slots(self, call):
        pools = [jax.ShapeDtypeStruct((2**26, 32, 2, 8), jnp.float32)] * 4
        with pytest.raises(ValueError, match="67108864 pages of 32 are more slots than an int32 can name"):
            jax.eval_shape(paged_write, **call | {"pools": pools})

    def test_all_at_once(self, call):
        with pytest.raises(ValueError, match=r"nodes holds float32.*slots is \(2, 4\)"):
            paged_write(**call | {"nodes": call["nodes"].astype(np.float32), "slots": call["slots"][:, 1:]})
