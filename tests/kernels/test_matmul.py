"""matmul: products of rows with plain, FP8 and MXFP4 weights, against float64."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import weight_tiles, weight_words
from pallas_kernels.matmul import api, config, matmul, pallas_triton, reference
from pallas_kernels.matmul.config import CONFIGS, Config, MosaicConfig, config_for, fastest
from pallas_kernels.matmul.shapes import SHAPES
from pallas_kernels.mxfp4 import LARGEST_SCALE, Mxfp4
from pallas_kernels.quantized import FP8, LARGEST, Quantized, scale_shape
from tests.kernels import ptx, test_mxfp4
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

# Weights as layers have them: blocks of 128 x 128, of one head, a partial one, and whole columns.
CASES = {
    "blocks": ("bnm,mkf->bnkf", (256, 2, 384), (128, 1, 128)),
    "heads": ("bnm,mgre->bngre", (160, 2, 3, 16), (128, 1, 1, 16)),
    "partial": ("bnf,fm->bnm", (300, 200), (128, 128)),
    "smaller than a block": ("bnf,fm->bnm", (48, 32), (48, 32)),
    "channels": ("bnhe,hem->bnm", (4, 16, 96), (4, 16, 1)),
}


def widened(w):
    """The weights in float64, by a loop over blocks."""
    values, scales = np.asarray(w.values).astype(np.float64), np.asarray(w.scales, np.float64)
    out = np.empty(values.shape)
    for cell in np.ndindex(scales.shape):
        box = tuple(slice(i * b, (i + 1) * b) for i, b in zip(cell, w.block, strict=True))
        out[box] = values[box] * scales[cell]
    return out


def make(shape, block, seed=0):
    rng = np.random.default_rng(seed)
    weights = rng.standard_normal(shape) * np.exp(rng.standard_normal(shape[:1] + (1,) * (len(shape) - 1)))
    return Quantized.of(jnp.asarray(weights, jnp.float32), block)


@pytest.mark.parametrize("parts", ["whole", "parts"])
@pytest.mark.parametrize("name", CASES)
def test_every_output_is_within_rounding_of_float64(name, parts, monkeypatch):
    if parts == "parts":
        monkeypatch.setattr(reference, "_PART", 5000)
    dtype = jnp.bfloat16 if parts == "whole" else jnp.float32
    spec, shape, block = CASES[name]
    w = make(shape, block)
    summed = len(spec.split(",")[1].split("->")[0].strip()) - len(spec.split("->")[1]) + 2
    rows = np.random.default_rng(1).standard_normal((1, 3, *shape[:summed]))
    x = jnp.asarray(rows, dtype)
    got = np.asarray(matmul(spec, x, w, implementation="xla"), np.float64)
    given, wide = np.asarray(x, np.float64), widened(w)
    terms = np.prod(shape[:summed])
    # A rounding of each weight, one of the result, and those of a sum in float32.
    unit = float(jnp.finfo(dtype).eps) / 2
    bound = (2 * unit * (1 + unit) + terms * 2.0**-24) * np.einsum(spec, abs(given), abs(wide))
    assert (abs(got - np.einsum(spec, given, wide)) <= bound).all()


def test_one_wrong_scale_is_outside_of_that_bound():
    spec, shape, block = CASES["blocks"]
    w = make(shape, block)
    wrong = Quantized(w.values, w.scales.at[1, 0, 2].multiply(1.5), block)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((1, 3, shape[0])), jnp.float32)
    apart = np.asarray(matmul(spec, x, wrong) - matmul(spec, x, w))
    assert (abs(apart[..., 0, 256:]) > 2.0**-8 * np.einsum(spec, abs(x), abs(widened(w)))[..., 0, 256:]).any()
    assert not apart[..., 0, :256].any()
    assert not apart[..., 1, :].any()


def test_quantising_keeps_the_largest_of_each_block_and_rounds_the_rest_to_three_bits():
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((300, 200)), jnp.float32)
    w = Quantized.of(weights, (128, 128))
    assert w.values.dtype == FP8
    assert w.scales.shape == (3, 2)
    wide, exact = widened(w), np.asarray(weights, np.float64)
    largest = abs(exact[128:256, 128:]).max()
    assert abs(wide[128:256, 128:]).max() == pytest.approx(largest, rel=1e-6)
    # Half of a step: 2^-4 of the value; below the smallest normal, 2^-6, half of 2^-9 times the scale.
    scale = np.asarray(w.scales).max()
    assert (abs(wide - exact) <= np.maximum(abs(exact) * 2.0**-4 * 1.00001, scale * 2.0**-10)).all()


def test_a_block_of_zeros_stays_zero():
    w = Quantized.of(jnp.full((4, 4), 1e-36), (4, 4))  # less than a scale can express
    assert not np.asarray(w.widened(jnp.dtype(jnp.float32))).any()
    w = Quantized.of(jnp.zeros((4, 4)), (4, 4))
    assert not np.asarray(w.widened(jnp.dtype(jnp.float32))).any()
    assert np.isfinite(np.asarray(w.scales)).all()


def test_the_largest_is_what_the_type_holds():
    assert LARGEST == 448


def test_a_loop_widens_a_part_of_one_product_at_a_time(monkeypatch):
    # Else XLA would widen what does not change before the loop, or all products at once. XLA:CPU keeps a copy
    # of the values' bits.
    monkeypatch.setattr(reference, "_PART", 2**12)
    size, count = 256, 8
    weights = [make((size, size), (128, 16), seed) for seed in range(count)]

    compiled = jax.jit(test_mxfp4.rounds).lower(weights, jnp.ones((2, size))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * count * size * size


def test_a_sum_over_two_axes_copies_no_weights():
    x, w = jnp.ones((1, 5, 4, 64)), jnp.ones((4, 64, 256))
    compiled = jax.jit(partial(matmul, "bnhe,hem->bnm")).lower(x, w).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < w.nbytes


def test_rows_have_derivatives(monkeypatch):
    monkeypatch.setattr(reference, "_PART", 2**10)
    spec, shape, block = CASES["smaller than a block"]
    block = (48, 8)
    w, x = make(shape, block), jnp.ones((1, 1, shape[0]))
    found = jax.grad(lambda x: jnp.sum(matmul(spec, x, w)))(x)
    np.testing.assert_allclose(found[0, 0], widened(w).sum(axis=1), rtol=1e-5, atol=1e-4)


def test_wrong_arrays_are_all_listed():
    w = make((256, 128), (128, 128))
    wrong = Quantized(w.values.astype(jnp.float32), w.scales[:1], w.block)
    with pytest.raises(ValueError, match=r"w holds float32.*w's scales is \(1, 1\), expected \(2, 1\)"):
        matmul("bm,mf->bf", jnp.ones((1, 256)), wrong)
    with pytest.raises(ValueError, match="no implementation 'triton'"):
        matmul("bm,mf->bf", jnp.ones((1, 256)), w, implementation="triton")
    for spec in ("bm,mf->fb", "bm,bm->bm"):
        with pytest.raises(ValueError, match=f"{spec}: the result must have"):
            matmul(spec, jnp.ones((4, 4)), jnp.ones((4, 4)))


@pytest.mark.usefixtures("no_type_checks")
def test_bytes_that_are_not_those_of_the_scales_are_refused():
    narrow = Mxfp4(jnp.zeros((96, 2, 16), jnp.uint8), jnp.zeros((96, 3), jnp.int8), 0)
    message = r"w's values is \(96, 2, 16\), expected \(96, 3, 16\); w's scales holds int8, expected uint8"
    with pytest.raises(ValueError, match=message):
        matmul("bm,mf->bf", jnp.ones((1, 96)), narrow)


class Product(NamedTuple):
    """A call of the kernel: M, the weights, how they are stored, and how the work is cut up."""

    spec: str
    rows: int
    shape: tuple[int, ...]
    stored: str
    block: tuple[int, ...] = ()
    summed: int = 1
    dtype: type = jnp.bfloat16
    config: Config = Config(16, 32, 64, 2, 4, 2)


#: Masks along every axis, several tiles of rows and of columns, and shares of sums.
PRODUCTS = [
    Product("bm,mf->bf", 17, (100, 40), "plain", dtype=jnp.float16),
    Product("bm,mf->bf", 40, (256, 64), "fp8", (128, 32), config=Config(64, 32, 64, 1, 4, 2)),
    Product("bm,mkf->bkf", 3, (300, 2, 72), "fp8", (128, 1, 32)),
    Product("bhe,hem->bm", 1, (3, 48, 40), "fp8", (1, 16, 40), 2, jnp.float32),
    Product("bm,mgf->bgf", 5, (224, 2, 24), "mxfp4", config=Config(16, 32, 128, 2, 4, 2)),
    Product("bm,mgf->bgf", 70, (224, 2, 24), "mxfp4", dtype=jnp.float32, config=Config(64, 32, 64, 2, 4, 2)),
]
MORE_PRODUCTS = [
    Product("bhe,hem->bm", 4, (4, 16, 96), "fp8", (4, 16, 1), 2),
    Product("bm,mgre->bgre", 2, (160, 2, 3, 16), "fp8", (128, 1, 1, 16), config=Config(16, 16, 128, 1, 4, 2)),
    Product("bm,mf->bf", 256, (64, 64), "plain", config=Config(128, 64, 32, 1, 4, 2)),
    Product("bm,mf->bf", 16, (96, 32), "mxfp4", dtype=jnp.float32, config=Config(16, 32, 32, 3, 4, 2)),
    Product("bm,mf->bf", 2, (64, 48), "mxfp4", dtype=jnp.float16),
]


def arrays_of(product):
    """Rows, weights, and the weights in float64."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((product.rows, *product.shape[: product.summed])), product.dtype)
    if product.stored == "mxfp4":
        w = test_mxfp4.random_mxfp4(product.shape, 0)
        return x, w, test_mxfp4.widened(w)
    if product.stored == "fp8":
        # Not by `make`, which would compile: values and scales of all sizes.
        # No subnormals: XLA:CPU rounds them to zero, where the kernel is interpreted.
        values = rng.standard_normal(product.shape)
        values = (values + np.copysign(2.0**-6, values)).astype(FP8)
        scales = np.exp(rng.standard_normal(scale_shape(product.shape, product.block))).astype(np.float32)
        w = Quantized(jnp.asarray(values), jnp.asarray(scales), product.block)
        return x, w, widened(w)
    w = jnp.asarray(rng.standard_normal(product.shape), product.dtype)
    return x, w, np.asarray(w, np.float64)


def kernel_s(product, x, w):
    run = partial(pallas_triton.matmul, spec=product.spec, wide=True, config=product.config, interpret=True)
    return np.asarray(run(x, w), np.float64)


@pytest.mark.parametrize("product", [*PRODUCTS, *map(wide, MORE_PRODUCTS)], ids=str)
def test_the_kernel_is_within_rounding_of_float64(product):
    x, w, exact = arrays_of(product)
    got, rows = kernel_s(product, x, w), np.asarray(x, np.float64)
    # Weights are exact in the rows' type, but for scales of FP8, whose sums are rounded once more; terms are
    # summed in float32.
    terms = math.prod(product.shape[: product.summed])
    bound = (terms + 2) * 2.0**-24 * np.einsum(product.spec, abs(rows), abs(exact))
    assert (abs(got - np.einsum(product.spec, rows, exact)) <= bound).all()


@pytest.mark.parametrize("product", [PRODUCTS[2], PRODUCTS[4]], ids=["fp8", "mxfp4"])
def test_one_wrong_scale_in_the_kernel_is_far_outside(product):
    x, w, exact = arrays_of(product)
    flat = w.scales.reshape(-1)
    wrong = flat.at[flat.size // 2].set(flat[flat.size // 2] + flat.dtype.type(1)).reshape(w.scales.shape)
    other = type(w)(w.values, wrong, w.block if product.stored == "fp8" else w.axis)
    apart = abs(kernel_s(product, x, other) - np.einsum(product.spec, np.asarray(x, np.float64), exact))
    bound = 2.0**-8 * np.einsum(product.spec, abs(np.asarray(x, np.float64)), abs(exact))
    assert (apart > bound).any()
    assert (apart <= bound).any()  # the other blocks


def test_rows_are_exact_in_float16():
    w = Quantized(jnp.zeros((64, 4), FP8), jnp.ones((1, 1)), (64, 4))
    x = np.random.default_rng(0).standard_normal((4, 64)) * 2.0 ** np.array([-90, 0, 120, 0])[:, None]
    x = jnp.asarray(x, jnp.bfloat16).at[3].set(0)
    values, scales = jax.jit(partial(weight_tiles.rows_for, w, in_float16=True))(x)
    assert values.dtype == jnp.float16
    np.testing.assert_array_equal(np.asarray(values, np.float64) * scales.T, np.asarray(x, np.float64))


def test_every_finite_code_of_fp8_is_exact_in_words():
    codes = np.arange(256, dtype=np.uint8).reshape(-1, weight_words.COLUMNS)
    words, finite = jnp.asarray(codes.view(np.uint32)), (codes & 127) != 127
    # Widened in NumPy, as XLA:CPU rounds subnormals to zero.
    bits = np.concatenate(weight_words._fp8_bits(words), axis=1)
    found = bits.view(jnp.bfloat16).astype(np.float64) * 2.0**120
    np.testing.assert_array_equal(found[finite], codes.view(FP8).astype(np.float64)[finite])


def test_every_code_of_fp8_is_exact_in_words_by_assembly():
    codes = np.arange(256, dtype=np.uint8).reshape(-1, weight_words.COLUMNS)
    widen = jax.jit(partial(weight_words.fp8_columns, dtype=jnp.dtype(jnp.float16)))
    found = np.concatenate(widen(jnp.asarray(codes.view(np.uint32))), axis=1)
    np.testing.assert_array_equal(found, codes.view(FP8).astype(np.float16))


def test_every_pair_of_codes_of_mxfp4_is_exact_in_words(monkeypatch):
    """With every scale from 2**-100 on; with smaller ones values are the nearest multiples of 2**-101."""

    def inline(code, count, shape, *registers):
        # Here, as on XLA:CPU's threads subnormal numbers are zero.
        result = ptx.run(code, *(np.asarray(own).view(np.uint32) for own in registers))
        return jnp.asarray(result.view(shape.dtype).reshape(shape.shape))

    monkeypatch.setattr(weight_words, "_inline", inline)
    count = LARGEST_SCALE + 1
    codes = np.resize(np.arange(2**16, dtype=np.uint16), (count, 512)).view(np.uint8)
    words, scales = codes.view(np.uint16), np.arange(count, dtype=np.uint8)[:, None]
    dtype = jnp.dtype(jnp.bfloat16)
    tiles = weight_words.mxfp4_terms(jnp.asarray(words), jnp.asarray(scales), dtype)
    found = np.stack(tiles, axis=1).astype(np.float64) / weight_words.mxfp4_factor(dtype)
    found = found.transpose(0, 2, 1).reshape(count, -1)
    values = test_mxfp4.VALUES[np.stack([codes & 15, codes >> 4], axis=-1)].reshape(count, -1)
    exact = values * 2.0 ** (scales.astype(np.float64) - 127)
    np.testing.assert_array_equal(found[27:], exact[27:])
    np.testing.assert_array_equal(found, np.rint(exact * 2.0**101) / 2.0**101)
    assert (np.signbit(found) == np.signbit(exact)).all()


class TestWhatTheKernelCannotDo:
    @pytest.mark.parametrize(
        ("spec", "rows", "w", "why"),
        [
            ("bm,mf->bf", 257, jnp.zeros((32, 16)), "257 rows: it is for 1 to 256"),
            ("bm,vm->bv", 1, jnp.zeros((16, 32)), "bm,vm->bv is not of the form"),
            ("bm,m->b", 1, jnp.zeros(32), "bm,m->b is not of the form"),
            (
                "bm,mf->bf",
                1,
                Quantized(jnp.zeros((48, 16), FP8), jnp.ones((2, 1)), (24, 16)),
                "after 24 terms",
            ),
            (
                "bm,mf->bf",
                1,
                Quantized(jnp.zeros((32, 18), FP8), jnp.ones((1, 1)), (32, 18)),
                "18 columns, no multiple of 4",
            ),
            (
                "bm,fm->bf",
                1,
                Mxfp4(jnp.zeros((16, 1, 16), jnp.uint8), jnp.zeros((16, 1), jnp.uint8), 1),
                "blocks do not lie along the first axis",
            ),
        ],
    )
    def test_is_said(self, spec, rows, w, why):
        terms = w.shape[-1] if spec in ("bm,vm->bv", "bm,fm->bf") else w.shape[0]
        assert why in api.OPERATION.table["pallas_triton"].unsupported(jnp.zeros((rows, terms)), w, spec)

    def test_fp8_on_a_gpu_without(self, monkeypatch):
        monkeypatch.setattr(weight_tiles, "fp8_problem", lambda: "no FP8")
        why = api.OPERATION.table["pallas_triton"].unsupported(
            jnp.zeros((1, 32)), Quantized(jnp.zeros((32, 16), FP8), jnp.ones((1, 1)), (32, 16)), "bm,mf->bf"
        )
        assert why == "no FP8"


SETTINGS = {
    "block_rows": 16,
    "block_columns": 16,
    "block_depth": 32,
    "splits": 1,
    "num_warps": 4,
}
ENTRY = {
    "stored": "plain",
    "rows": 16,
    "depth": 32,
    "columns": 64,
    "implementation": "pallas_triton",
    "micros": 2.0,
    "xla_micros": 3.0,
}


class TestChoice:
    """By default XLA's product, but where the kernel was measured to be faster."""

    @pytest.fixture
    def measured(self, monkeypatch):
        def there(**changes):
            entry = {**ENTRY, "config": {**SETTINGS, "num_stages": 2}, **changes}
            monkeypatch.setattr(config, "tuned", lambda: {"X": [entry]})

        return there

    def test_entries(self, measured):
        measured()
        assert fastest("X", "plain", 9, 32, 64) == "pallas_triton"
        for other in (("Y", "plain", 9, 32, 64), ("X", "fp8", 9, 32, 64), ("X", "plain", 17, 32, 64)):
            assert fastest(*other) is None
            assert config_for("pallas_triton", *other) is None
        assert config_for("pallas_triton", "X", "plain", 16, 32, 64) == Config(**SETTINGS, num_stages=2)
        assert config_for("pallas_mosaic", "X", "plain", 16, 32, 64) is None
        measured(micros=3.5)
        assert fastest("X", "plain", 9, 32, 64) == "xla"
        measured(implementation="pallas_mosaic", config={"groups": 2, "splits": 5})
        assert config_for("pallas_mosaic", "X", "plain", 9, 32, 64) == MosaicConfig(2, 5)

    @pytest.mark.parametrize(
        ("dtype", "rows", "taken"), [("bfloat16", 16, 1), ("bfloat16", 17, 0), ("float32", 1, 0)]
    )
    def test_default(self, dtype, rows, taken, measured, monkeypatch):
        measured()
        monkeypatch.setattr(api, "gpu_problem", lambda: None)
        monkeypatch.setattr("pallas_kernels.dispatch.gpu_problem", lambda: None)
        monkeypatch.setattr(api, "device_kind", lambda: "X")
        arrays = jnp.zeros((rows, 32), dtype), jnp.zeros((32, 64), dtype)
        assert lower_for_gpu(partial(matmul, "bm,mf->bf"), *arrays).count(KERNEL) == taken

    @pytest.mark.parametrize(
        ("capability", "block", "rows", "taken"),
        [
            ((9, 0), (128, 128), 128, 1),
            ((9, 0), (128, 128), 129, 0),
            ((9, 0), (256, 1), 1, 0),
            ((9, 0), None, 128, 1),
            ((9, 0), None, 129, 0),
            ((10, 0), (128, 128), 1, 0),
            ((8, 9), (128, 128), 1, 0),
            ((8, 9), None, 1, 0),
        ],
    )
    def test_quantised_blocks_on_hopper(self, capability, block, rows, taken, monkeypatch):
        """Without a measurement of these sizes; None is MXFP4, and (256, 1) one scale for each column."""
        monkeypatch.setattr(api, "gpu_problem", lambda: None)
        monkeypatch.setattr("pallas_kernels.dispatch.gpu_problem", lambda: None)
        monkeypatch.setattr(api, "compute_capability", lambda: capability)
        shape = 256, 256
        if block is None:
            w = Mxfp4.of(jnp.zeros(shape), 0)
        else:
            w = Quantized(jnp.zeros(shape, FP8), jnp.ones(scale_shape(shape, block), jnp.float32), block)
        lowered = lower_for_gpu(partial(matmul, "bm,mf->bf"), jnp.zeros((rows, 256), jnp.bfloat16), w)
        assert lowered.count(KERNEL) == taken

    def test_a_measurement_of_blocks_says_nothing_of_columns(self, measured, monkeypatch):
        measured(stored="fp8")
        monkeypatch.setattr(api, "gpu_problem", lambda: None)
        monkeypatch.setattr("pallas_kernels.dispatch.gpu_problem", lambda: None)
        monkeypatch.setattr(api, "device_kind", lambda: "X")
        taken = []
        for block in ((32, 64), (32, 1)):
            w = Quantized(
                jnp.zeros((32, 64), FP8), jnp.ones(scale_shape((32, 64), block), jnp.float32), block
            )
            lowered = lower_for_gpu(partial(matmul, "bm,mf->bf"), jnp.zeros((1, 32), jnp.bfloat16), w)
            taken.append(lowered.count(KERNEL))
        assert taken == [1, 0]

    def test_what_is_shipped_is_valid(self):
        for entries in config.tuned().values():
            for entry in entries:
                assert CONFIGS[entry["implementation"]](**entry["config"])
                assert {*ENTRY} <= {*entry}
            keys = [(e["stored"], e["depth"], e["columns"], e["rows"]) for e in entries]
            assert keys == sorted(set(keys))


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="block_depth must be a power of two of at least 32, not 16; splits"):
        Config(16, 64, 16, 0, num_warps=4, num_stages=2)


@pytest.mark.parametrize(
    ("shape", "stored", "rows"),
    [
        *((SHAPES[i], stored, 1) for i in (2, 4) for stored in SHAPES[i].stored),
        *(
            wide(shape, shape.stored[i % len(shape.stored)], (64, 256)[i % 2])
            for i, shape in enumerate(SHAPES)
        ),
    ],
    ids=str,
)
def test_lowers_for_cuda(shape, stored, rows):
    depth, columns = shape.depth, shape.columns
    fp8 = [((depth, columns), FP8), (scale_shape((depth, columns), (128, 128)), jnp.float32)]
    made = {
        "plain": ([((depth, columns), jnp.bfloat16)], lambda w: w),
        "fp8": (fp8, lambda values, scales: Quantized(values, scales, (128, 128))),
        "fp8_rows": (fp8, lambda values, scales: Quantized(values, scales, (128, 128), 128)),
        "mxfp4": (
            [((columns, depth // 32, 16), jnp.uint8), ((columns, depth // 32), jnp.uint8)],
            lambda values, scales: Mxfp4(values, scales, 0),
        ),
    }
    parts, make_weights = made[stored]
    arrays = [jax.ShapeDtypeStruct(*part) for part in [((rows, depth), jnp.bfloat16), *parts]]

    def run(x, *arrays):
        return pallas_triton.matmul(x, make_weights(*arrays), spec="bm,mf->bf", wide=False)

    assert lower_for_gpu(run, *arrays).count(KERNEL) == 1
