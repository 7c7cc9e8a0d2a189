"""tree_attention against a float64 loop over tokens, and the properties its callers rely on."""

from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle, groupby, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tree_attention import PagedPrefix, api, pallas_triton, tree_attention
from pallas_kernels.tree_attention.config import Config, config_for, tuned
from pallas_kernels.tree_attention.reference import unpack_mask
from pallas_kernels.tree_attention.shapes import SHAPES
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

PAGE, TABLE, SPARE = 16, 3, 3
CAPACITY = PAGE * TABLE
LENGTHS = (0, 1, 7, 33, CAPACITY)
# Half a step of bfloat16 below 4 is 8e-3.
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1e-2, jnp.float16: 1.5e-3}
# Block rows, query heads of each key/value head, a dtype and a window.
CASES = [
    (1, 4, jnp.float32, 10),  # shorter than a prefix
    (7, 1, jnp.float32, 1),  # hides all but a row itself
    (16, 2, jnp.float32, None),
    wide(16, 2, jnp.float32, 3),  # shorter than the tree is deep
    (33, 4, jnp.float32, None),
    (64, 2, jnp.bfloat16, 1000),  # longer than everything
    wide(7, 4, jnp.float16, 10),
]


def name_of(value):
    return getattr(value, "name", None)


@dataclass(frozen=True, eq=False)
class Case:
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    seen: np.ndarray  # [B, N, N]
    depths: np.ndarray
    sinks: np.ndarray
    pool: np.ndarray  # [2, P, page, G, E]: pages of keys, pages of values
    tables: np.ndarray
    lengths: np.ndarray

    def args(self):
        block = self.q, self.k, self.v, pack(self.seen)
        prefix = PagedPrefix(*map(jnp.asarray, (*self.pool, self.tables, self.lengths)))
        return (*map(jnp.asarray, block), prefix)


def pack(seen):
    """Bits of [B, N, N] as words; the bits past N of the last word are set, and mean nothing."""
    batch, rows, _ = seen.shape
    bits = np.ones((batch, rows, -(-rows // 32) * 32), np.uint8)
    bits[:, :, :rows] = seen
    return np.packbits(bits, axis=-1, bitorder="little").view("<u4")


def random_tree(rng, rows, padding):
    """Ancestor-or-self mask and depths of a random tree; the last `padding` rows see nothing."""
    seen, depths = np.zeros((rows, rows), bool), np.zeros(rows, np.int32)
    for i in range(rows - padding):
        if i:
            parent = rng.integers(max(0, i - 3), i)
            seen[i], depths[i] = seen[parent], depths[parent] + 1
        seen[i, i] = True
    return seen, depths


@cache
def make_case(rows, ratio=2, dtype=jnp.float32, size=16, kv_heads=2, lengths=LENGTHS, poison=np.nan):
    """Random trees, every other one padded, over shuffled pages; whatever nobody may see holds `poison`."""
    rng, batch = np.random.default_rng(rows), len(lengths)

    def normal(*shape):
        return rng.standard_normal(shape).astype(dtype)

    trees = [random_tree(rng, rows, padding=rows // 5 * (1 - b % 2)) for b in range(batch)]
    seen, depths = (np.stack(part) for part in zip(*trees, strict=True))
    q = normal(batch, rows, kv_heads * ratio, size)
    k, v = normal(2, batch, rows, kv_heads, size)
    unseen = ~seen.any(axis=1)
    k[unseen], v[unseen] = poison, poison

    pages = batch * TABLE + SPARE
    pool = normal(2, pages, PAGE, kv_heads, size)
    tables = rng.permutation(pages)[: batch * TABLE].reshape(batch, TABLE).astype(np.int32)
    used = np.zeros((pages, PAGE), bool)
    for table, length in zip(tables, lengths, strict=True):
        for s in range(length):
            used[table[s // PAGE], s % PAGE] = True
        empty = -(-length // PAGE)
        table[empty:] = rng.choice([-1, -pages, pages, 2**31 - 1], TABLE - empty)
    pool[:, ~used] = poison
    lengths = np.asarray(lengths, np.int32)
    sinks = rng.standard_normal(kv_heads * ratio).astype(np.float32)
    return Case(q, k, v, seen, depths, sinks, pool, tables, lengths)


@cache
def oracle(case, scale, window, sinks, prefix):
    """The definition, token by token in float64."""
    arrays = case.q, case.k, case.v, *case.pool
    q, k, v, k_pages, v_pages = (x.astype(np.float64) for x in arrays)
    batch, rows, heads, _ = q.shape
    ratio = heads // k.shape[2]
    out = np.zeros_like(q)
    for b in range(batch):
        length = int(case.lengths[b]) if prefix else 0
        for i in range(rows):
            first = -1 if window is None else length + case.depths[b, i] - window
            keys, values = [], []
            for s in range(length):
                if s > first:
                    page = case.tables[b, s // PAGE], s % PAGE
                    keys.append(k_pages[page])
                    values.append(v_pages[page])
            for j in range(rows):
                if case.seen[b, i, j] and length + case.depths[b, j] > first:
                    keys.append(k[b, j])
                    values.append(v[b, j])
            for h in range(heads if keys else 0):
                scores = np.array([q[b, i, h] @ key[h // ratio] for key in keys]) * scale
                logits = np.append(scores, case.sinks[h]) if sinks else scores
                weights = np.exp(scores - logits.max()) / np.exp(logits - logits.max()).sum()
                out[b, i, h] = weights @ np.array([value[h // ratio] for value in values])
    return out


def registered_call(shape, rows, length, dtype):
    pool = jnp.zeros((length // shape.page, shape.page, shape.kv_heads, shape.head_size), dtype)
    tables = jnp.zeros((1, length // shape.page), jnp.int32)
    prefix = PagedPrefix(pool, pool, tables, jnp.asarray([length], jnp.int32))
    q = jnp.zeros((1, rows, shape.heads, shape.head_size), dtype)
    k = jnp.zeros((1, rows, shape.kv_heads, shape.head_size), dtype)
    return q, k, k, jnp.zeros((1, rows, -(-rows // 32)), jnp.uint32), prefix


def test_unpack_mask_example():
    mask = jnp.asarray([[[0b0001], [0b0011], [0b0111], [0b1001]]], jnp.uint32)
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]]
    np.testing.assert_array_equal(unpack_mask(mask)[0], np.asarray(expected, bool))


def test_unpack_mask_words():
    seen = np.random.default_rng(0).random((2, 70, 70)) < 0.5
    np.testing.assert_array_equal(unpack_mask(jnp.asarray(pack(seen))), seen)


class TreeAttentionSuite:
    implementation: str

    @classmethod
    @cache
    def jitted(cls, scale, window):
        attend = partial(tree_attention, implementation=cls.implementation)
        return jax.jit(partial(attend, scale=scale, window=window))

    def run(self, case, *, scale=0.4, window=None, sinks=False, prefix=True, **settings):
        """The jitted operation on a case, back on the host."""
        *block, pages = case.args()
        settings = {"depths": case.depths, "sinks": case.sinks if sinks else None} | settings
        return np.asarray(self.jitted(scale, window)(*block, pages if prefix else None, **settings))

    def check(self, case, *, scale=0.4, window=None, sinks=False, prefix=True):
        out = self.run(case, scale=scale, window=window, sinks=sinks, prefix=prefix)
        expected = oracle(case, scale, window, sinks, prefix)
        assert out.dtype == case.q.dtype
        atol = TOLERANCE[case.q.dtype.type]
        np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=atol)

    @pytest.mark.parametrize(("rows", "ratio", "dtype", "window"), CASES)
    def test_oracle(self, rows, ratio, dtype, window):
        case = make_case(rows, ratio, dtype)
        assert rows < 16 or case.depths.max() > 3
        self.check(case, window=window)

    @pytest.mark.parametrize("window", [None, 3])
    def test_sinks(self, window):
        self.check(make_case(16), window=window, sinks=True)

    def test_no_prefix(self):
        case = make_case(33, 4)
        self.check(case, prefix=False)
        out = self.run(replace(case, lengths=np.zeros_like(case.lengths)))
        np.testing.assert_allclose(out, self.run(case, prefix=False), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("shape", [*SHAPES[3:5], *map(wide, [*SHAPES[:3], *SHAPES[5:]])], ids=name_of)
    def test_heads_in_use(self, shape):
        ratio = shape.heads // shape.kv_heads
        case = make_case(5, ratio, jnp.float32, shape.head_size, shape.kv_heads, (6, 0))
        window = None if shape.window is None else 4
        self.check(case, scale=shape.head_size**-0.5, window=window, sinks=shape.sinks)

    @pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
    def test_rows_that_see_nothing(self, sinks):
        """Padding over nothing committed, and a window that has left the prefix behind."""
        case = make_case(16)
        out = self.run(case, sinks=sinks)
        padding = ~case.seen.any(axis=2)
        assert padding.any()
        assert not out[0][padding[0]].any()
        assert out[1:][padding[1:]].any(axis=(-2, -1)).all()

        out = self.run(case, sinks=sinks, depths=case.depths + 3, window=3)
        assert not out[padding].any()
        assert np.isfinite(out).all()

    def test_what_nobody_sees_changes_nothing(self):
        out = self.run(make_case(16, poison=0))
        for poison in (np.nan, np.inf, -np.inf):
            np.testing.assert_array_equal(out, self.run(make_case(16, poison=poison)))

    def test_what_a_window_hides_changes_nothing(self):
        """Here all of a prefix but its last two tokens: the rest may have been given away."""
        case = make_case(16)
        pool = case.pool.copy()
        for table, length in zip(case.tables, case.lengths, strict=True):
            for s in range(length - 2):
                pool[:, table[s // PAGE], s % PAGE] = np.nan
        out = self.run(replace(case, pool=pool), window=3)
        np.testing.assert_array_equal(out, self.run(case, window=3))

    def test_large_scores(self):
        case = make_case(16)
        case = replace(case, q=200 * case.q)
        out = self.run(case)
        np.testing.assert_allclose(out, oracle(case, 0.4, None, False, True), rtol=0, atol=1e-3)

    def test_page_order_changes_nothing(self):
        case = make_case(16)
        pages = case.pool.shape[1]
        order = np.random.default_rng(1).permutation(pages)
        present = (case.tables >= 0) & (case.tables < pages)
        tables = np.where(present, np.argsort(order)[case.tables % pages], case.tables)
        moved = replace(case, pool=case.pool[:, order], tables=tables.astype(np.int32))
        np.testing.assert_array_equal(self.run(case), self.run(moved))

    def test_second_call_has_the_same_bits(self):
        case = make_case(64, 2, jnp.bfloat16)
        np.testing.assert_array_equal(self.run(case, window=1000), self.run(case, window=1000))

    def test_batch_equals_alone(self):
        case = make_case(16)
        together = self.run(case)
        for b in range(len(LENGTHS)):
            own = {
                name: getattr(case, name)[b : b + 1]
                for name in ("q", "k", "v", "seen", "depths", "tables", "lengths")
            }
            alone = self.run(replace(case, **own))
            np.testing.assert_allclose(alone[0], together[b], rtol=0, atol=1e-6)


class TestXla(TreeAttentionSuite):
    implementation = "xla"

    def test_chain_is_the_default(self):
        case = make_case(16)
        chain = np.broadcast_to(np.arange(16, dtype=np.int32), case.depths.shape)
        default = self.run(case, depths=None, window=3)
        np.testing.assert_array_equal(default, self.run(case, depths=chain, window=3))
        assert not np.array_equal(default, self.run(case, window=3))


class TestPallasTritonInterpreted(TreeAttentionSuite):
    """As on a GPU, which it fills, the kernel splits the keys of few rows, and not those of many."""

    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        config = Config(16, 64, 4, 2, programs=60)
        stand_in(api, partial(pallas_triton.tree_attention, config=config, interpret=True))

    @pytest.mark.parametrize(
        "config",
        [Config(32, 32, 4, 2, programs=1), Config(16, 16, 4, 2, programs=1000)],
        ids=["one", "as many as there are steps"],
    )
    def test_splits(self, config):
        case = make_case(16)
        attend = partial(pallas_triton.tree_attention, scale=0.4, window=3, config=config, interpret=True)
        out = jax.jit(attend)(*case.args(), depths=case.depths, sinks=case.sinks)
        np.testing.assert_allclose(out, oracle(case, 0.4, 3, True, True), rtol=0, atol=1e-5)


class TestPallasTriton:
    @pytest.mark.parametrize(
        ("shape", "dtype"),
        [(shape, jnp.bfloat16) for shape in SHAPES[2:5]]
        + [wide(shape, jnp.bfloat16) for shape in (*SHAPES[:2], *SHAPES[5:])]
        + [wide(shape, jnp.float32) for shape in SHAPES if shape.head_size == 64],
        ids=name_of,
    )
    def test_lowers_for_cuda(self, shape, dtype):
        attend = partial(pallas_triton.tree_attention, scale=1.0, window=shape.window)

        def call(args, depths, sinks):
            return attend(*args, depths=depths, sinks=sinks)

        for rows, length in ((1, 32768), (128, 1024)):
            args = jax.eval_shape(partial(registered_call, shape, rows, length, dtype))
            depths = jax.ShapeDtypeStruct((1, rows), jnp.int32)
            sinks = jax.ShapeDtypeStruct((shape.heads,), jnp.float32) if shape.sinks else None
            assert KERNEL in lower_for_gpu(call, args, depths, sinks)

    def test_unsupported_shapes(self):
        case = make_case(7, size=8)
        assert "head size 8 is not" in pallas_triton.unsupported(*case.args())
        *block, prefix = make_case(7).args()
        pages = jnp.zeros((2, 24, 2, 16))
        odd = replace(prefix, k_pages=pages, v_pages=pages)
        assert "pages of 24 tokens" in pallas_triton.unsupported(*block, odd)
        assert pallas_triton.unsupported(*block, prefix) is None


class TestConfig:
    def test_every_shape_has_one(self):
        for kind in ("", *tuned()):
            for shape, dtype in product(SHAPES, ("float32", "bfloat16", "float16")):
                for rows in shape.rows:
                    folded = rows * shape.heads // shape.kv_heads
                    assert config_for(kind, dtype, shape.head_size, folded).block_keys >= 16

    def test_tuned_entries_are_in_order(self):
        """The fewest rows first, so that the first that fits is the closest."""
        for entries in tuned().values():
            for key, group in groupby(entries, lambda entry: (entry["dtype"], entry["head_size"])):
                rows = [entry["rows"] for entry in group]
                assert rows == sorted(set(rows)), key

    def test_all_mistakes_at_once(self):
        with pytest.raises(ValueError, match=r"block_rows must be .* not 24; num_stages must be .* not 0"):
            Config(24, 32, 4, 0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_registry_is_traceable(shape):
    def call(rows, length):
        args = registered_call(shape, rows, length, jnp.float32)
        return tree_attention(*args, scale=1.0, window=shape.window)

    for rows, length in zip(shape.rows, cycle(shape.prefixes), strict=False):
        out = jax.eval_shape(partial(call, rows, length))
        assert out.shape == (1, rows, shape.heads, shape.head_size)
    assert not any(length % shape.page for length in shape.prefixes)


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.fixture
    def call(self):
        q, k, v, mask, prefix = make_case(33).args()
        return {"q": q, "k": k, "v": v, "mask": mask, "prefix": prefix, "scale": 1.0}

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("q", lambda x: x[0], r"q must be \[B, N, H, E\]"),
            ("q", lambda x: x[:, :, :3], "3 query heads do not divide among 2"),
            ("k", lambda x: x[:, :32], r"k is \(5, 32, 2, 16\), expected \(5, 33, 2, 16\)"),
            ("v", lambda x: x.astype(jnp.bfloat16), "v holds bfloat16, expected float32"),
            ("mask", lambda x: x[:, :, :1], r"mask is \(5, 33, 1\), expected \(5, 33, 2\)"),
            ("prefix", lambda x: replace(x, k_pages=x.k_pages[..., :4]), "prefix.k_pages is "),
            ("prefix", lambda x: replace(x, block_tables=x.block_tables[0]), "block_tables is "),
            ("prefix", lambda x: replace(x, lengths=x.lengths * 1.0), "lengths holds float32"),
            ("prefix", lambda x: replace(x, k_pages=x.k_pages[:0]), "no page or no slot"),
        ],
    )
    def test_arrays(self, call, name, change, message):
        with pytest.raises(ValueError, match=message):
            tree_attention(**call | {name: change(call[name])})

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"scale": 0.0}, "scale is 0.0"),
            ({"window": 0}, "window is 0"),
            ({"depths": jnp.zeros((5, 32), jnp.int32)}, r"depths is \(5, 32\)"),
            ({"sinks": jnp.zeros(2)}, r"sinks is \(2,\), expected \(4,\)"),
        ],
    )
    def test_settings(self, call, settings, message):
        with pytest.raises(ValueError, match=message):
            tree_attention(**call | settings)

    def test_all_at_once(self, call):
        with pytest.raises(ValueError, match=r"window is 0.*mask is "):
            tree_attention(**call | {"mask": call["mask"][:, :, :1]}, window=0)
