"""Rows in FP8: what is quantised, and products of quantised rows and weights against float64."""

import math
import re
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activation import SILU
from pallas_kernels.expert_mlp import api as expert_api
from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.expert_mlp import pallas_triton as expert_kernel
from pallas_kernels.matmul import api, matmul, pallas_mosaic, pallas_triton, reference
from pallas_kernels.matmul.config import Config, MosaicConfig
from pallas_kernels.quantize_rows import api as rows_api
from pallas_kernels.quantize_rows import pallas_triton as rows_kernel
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.quantize_rows import reference as rows_reference
from pallas_kernels.quantized import FP8, LARGEST, Quantized, scale_shape
from tests.kernels.lowering import KERNEL, MOSAIC, launches, lower_for_gpu
from tests.kernels.test_matmul import widened
from tests.marks import wide


def quantised(x, group):
    """Rows' values and scales by NumPy, in float32 as they are defined, and the rows that they stand for."""
    x = np.asarray(x, np.float32)
    group = group or x.shape[1]
    values, scales = np.empty(x.shape, FP8), np.empty((x.shape[0], -(-x.shape[1] // group)), np.float32)
    exact = np.empty(x.shape)
    for row, i in np.ndindex(scales.shape):
        place = row, slice(i * group, (i + 1) * group)
        scale = abs(x[place]).max() * np.float32(1 / 448)
        scales[row, i] = scale = scale if not scale < 2.0**-126 else 1
        values[place] = (x[place] * (np.float32(1) / scale)).astype(FP8)
        exact[place] = values[place].astype(np.float64) * scale
    return values, scales, exact


def at_no_boundary(x, group):
    """Whether rows that are off by rounding in float32 are quantised to the same values."""
    off = 3e-7 * np.random.default_rng(0).choice((-1, 1), x.shape) * abs(x).max(axis=-1, keepdims=True)
    return (quantised(x + off, group)[0] == quantised(x - off, group)[0]).all()


def rows_of(count, terms, dtype, seed=0):
    """Rows whose groups differ by factors; some are zero."""
    rng = np.random.default_rng(seed)
    x = (
        rng.standard_normal((count, terms))
        * np.exp(2 * rng.standard_normal((count, -(-terms // 32))))[:, np.arange(terms) // 32]
    )
    x[0, : terms // 2] = 0
    return jnp.asarray(x, dtype)


@partial(jax.jit, static_argnums=(1, 2))
def rows_by_xla(x, group, length):
    return rows_reference.quantize_rows(x, group, length)


def rows_by_kernel(x, group, length):
    return rows_kernel.quantize_rows(x, group=group, length=length, interpret=True)


def bits(values, scales, count):
    """Those of the first rows' values and scales. The bits of a NaN are not specified."""
    values, scales = np.asarray(values)[:count], np.asarray(scales)[:, :count]
    values = np.where(np.isnan(values.astype(np.float32)), 127, values.view(np.uint8))
    return values, np.where(np.isnan(scales), np.nan, scales).view(np.int32).T


class TestRows:
    @pytest.mark.parametrize("run", [rows_by_xla, rows_by_kernel])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize(("terms", "group"), [(576, 128), (96, 32), (100, 0), (24, 128)])
    def test_values_and_scales_are_numpy_s(self, terms, group, dtype, run):
        x = rows_of(33, terms, dtype)
        x = x.at[3].multiply(1e-42 if dtype == jnp.float32 else 1e-3)  # scales below the least normal number
        values, scales, exact = quantised(x, group)
        got = run(x, group, 33)
        np.testing.assert_array_equal(np.asarray(got[1]).T, scales)
        np.testing.assert_array_equal(np.asarray(got[0]).view(np.uint8) & 127, values.view(np.uint8) & 127)
        assert abs(values[5].astype(np.float32)).max() == LARGEST
        assert (scales[0, : terms // 2 // (group or terms)] == 1).all()
        # Half of a step: 2^-4 of the value; below the smallest normal, 2^-6, half of 2^-9 times the scale.
        spread = np.repeat(scales, group or terms, axis=1)[:, :terms]
        wrong = abs(exact - np.asarray(x, np.float64))
        assert (wrong <= np.maximum(abs(exact) * 2.0**-4, spread * 2.0**-10) * 1.07)[4:].all()

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
    @pytest.mark.parametrize(("terms", "group"), [(1100, 128), (1300, 32), (1100, 0), (24, 128)])
    def test_the_kernel_gives_the_reference_s_bits(self, terms, group, dtype):
        x = rows_of(9, terms, dtype).at[3].set(jnp.nan).at[4, 2].set(-jnp.inf).at[5, 3].set(-jnp.nan)
        x = x.at[6].multiply(1e-42 if dtype == jnp.float32 else 1e-3)
        expected, got = (bits(*run(x, group, 16), 9) for run in (rows_by_xla, rows_by_kernel))
        for own, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(own, other)
        assert (expected[0][3] == 127).all()
        assert expected[0][4, 2] == 127  # infinity times zero

    @pytest.mark.parametrize("run", [rows_by_xla, rows_by_kernel])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_a_row_has_the_same_bits_whatever_other_rows_there_are(self, dtype, run):
        x = rows_of(130, 576, dtype).at[7].set(jnp.nan)
        whole = bits(*run(x, 128, 130), 130)
        for first, count in ((0, 1), (5, 1), (8, 16), (1, 129)):
            part = bits(*run(x[first : first + count], 128, 160), count)
            for own, all_rows in zip(part, whole, strict=True):
                np.testing.assert_array_equal(own, all_rows[first : first + count])
        assert (whole[0][7] == 127).all()

    @pytest.mark.parametrize(("terms", "group"), [(12288, 128), (576, 128), (4096, 0), (1100, 0)])
    def test_the_kernel_lowers_for_cuda(self, terms, group):
        for rows, dtype in ((1, jnp.bfloat16), (128, jnp.float16), (2048, jnp.float32)):
            x = jax.ShapeDtypeStruct((rows, terms), dtype)
            assert rows_kernel.unsupported(x, group) is None
            program = lower_for_gpu(partial(rows_kernel.quantize_rows, group=group, length=rows), x)
            assert launches(program) == {"quantize_rows": 1}
            assert "rcp.rn.f32" in program  # division rounds otherwise

    def test_what_the_kernel_cannot_do_is_said(self, monkeypatch):
        x = jnp.zeros((2, 20000), jnp.bfloat16)
        assert rows_kernel.unsupported(x[:0], 128) == "x has no elements"
        assert rows_kernel.unsupported(x, 96) == "groups of 96 terms, no power of two"
        assert rows_kernel.unsupported(x, 0) == "groups of 20000 terms are longer than 16384"
        monkeypatch.setattr(rows_kernel, "fp8_problem", lambda: "no FP8")
        assert rows_kernel.unsupported(x, 128) == "no FP8"

    def test_wrong_arguments_are_said(self):
        with pytest.raises(ValueError, match="quantize_rows: length is 1, less than 2 rows"):
            quantize_rows(jnp.zeros((2, 64)), 32, length=1)

    def test_have_no_derivatives(self):
        w = Quantized(jnp.ones((64, 32), FP8), jnp.ones((1, 1)), (64, 32), 64)
        for implementation in (None, "xla"):
            product = partial(matmul, "bm,mf->bf", implementation=implementation)
            with pytest.raises(NotImplementedError, match="rows quantised in FP8 have no derivatives"):
                jax.grad(lambda x, product=product: jnp.sum(product(x, w)))(jnp.ones((1, 64)))
        kernel = rows_api.OPERATION.table["pallas_triton"].function
        with pytest.raises(NotImplementedError, match="rows quantised in FP8 have no derivatives"):
            lower_for_gpu(jax.grad(lambda x: jnp.sum(kernel(x, group=64, length=1)[1])), jnp.ones((1, 64)))


class Product(NamedTuple):
    """A product of quantised rows: M, the weights, and how the kernel cuts the work up."""

    spec: str
    rows: int
    shape: tuple[int, ...]
    block: tuple[int, ...]
    group: int
    summed: int = 1
    dtype: type = jnp.bfloat16
    config: Config = Config(16, 32, 128, 2, 4, 2)


PRODUCTS = [
    Product("bm,mf->bf", 3, (576, 72), (128, 32), 128),
    Product("bm,mkf->bkf", 70, (256, 2, 24), (128, 1, 24), 128, config=Config(64, 16, 64, 1, 4, 2)),
    Product("bhe,hem->bm", 1, (3, 64, 40), (1, 64, 40), 128, 2, jnp.float32),  # a group is two heads
    Product("bm,mf->bf", 17, (300, 40), (300, 1), 0, dtype=jnp.float16),
    Product("bm,mf->bf", 2, (48, 32), (48, 32), 128),
]
MORE_PRODUCTS = [
    Product("bm,mgre->bgre", 5, (160, 2, 3, 16), (32, 1, 1, 16), 32, dtype=jnp.float32),
    Product("bhe,hem->bm", 300, (4, 64, 96), (4, 64, 1), 0, 2),
]


def arrays_of(product):
    """Rows, weights, and both in float64 as they are quantised, in matrices."""
    rng, depth = np.random.default_rng(1), math.prod(product.shape[: product.summed])
    values = (30 * rng.standard_normal(product.shape)).astype(FP8)
    scales = np.exp(rng.standard_normal(scale_shape(product.shape, product.block))).astype(np.float32)
    w = Quantized(jnp.asarray(values), jnp.asarray(scales), product.block, product.group)
    x = rows_of(product.rows, depth, product.dtype)
    exact = quantised(x, product.group)[2], widened(w).reshape(depth, -1)
    return x.reshape(product.rows, *product.shape[: product.summed]), w, *exact


def within(got, rows, weights):
    """Whether products are within rounding of float64: sums in float32, which are rounded twice more."""
    got = np.asarray(got, np.float64).reshape(rows.shape[0], -1)
    bound = (rows.shape[1] + 4) * 2.0**-24 * (abs(rows) @ abs(weights))
    return (abs(got - rows @ weights) <= bound).all()


def kernel(product, x, w):
    """On a CPU: the tensor cores of some GPUs add products of FP8 with fewer bits than float32 has."""
    run = partial(pallas_triton.matmul, spec=product.spec, wide=True, config=product.config, interpret=True)
    with jax.default_device(jax.devices("cpu")[0]):
        return run(x, w)


def by_xla(product, x, w):
    return matmul(product.spec, x, w, wide=True, implementation="xla")


@pytest.mark.parametrize("run", [by_xla, kernel])
@pytest.mark.parametrize("product", [*PRODUCTS, *map(wide, MORE_PRODUCTS)], ids=str)
def test_products_are_within_rounding_of_float64(product, run):
    x, w, rows, weights = arrays_of(product)
    assert within(run(product, x, w), rows, weights)


def test_parts_of_columns_are_within_rounding_of_float64(monkeypatch):
    monkeypatch.setattr(reference, "_PART", 5000)
    x, w, rows, weights = arrays_of(PRODUCTS[0])
    assert within(by_xla(PRODUCTS[0], x, w), rows, weights)


MOSAIC_PRODUCTS = [
    (Product("bm,mf->bf", 5, (512, 256), (128, 128), 128), MosaicConfig(2, 2)),
    (Product("bhe,hem->bm", 130, (2, 128, 384), (1, 128, 128), 128, 2), MosaicConfig(3, 1)),
]


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="JAX 0.10 has no interpreter for Mosaic kernels")
@pytest.mark.parametrize(("product", "config"), MOSAIC_PRODUCTS, ids=str)
def test_the_mosaic_kernel_is_within_rounding_of_float64(product, config, monkeypatch):
    """The interpreter also looks for races. What it cannot run is replaced: the sums' way to memory."""

    def store(sums, out_ref):
        out_ref[...] = sums.T.astype(out_ref.dtype)

    monkeypatch.setattr(pallas_mosaic, "store_transposed", store)
    # Where there is a GPU, the interpreter would also take the kernel of another backend that quantises rows.
    monkeypatch.setattr(pallas_mosaic, "quantize_rows", partial(quantize_rows, implementation="xla"))
    x, w, rows, weights = arrays_of(product)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        got = pallas_mosaic.matmul(x, w, spec=product.spec, wide=True, config=config)
    assert within(got, rows, weights)


@pytest.mark.parametrize("run", [by_xla, kernel])
def test_a_wrong_scale_is_outside_of_that_bound(run):
    x, w, rows, weights = arrays_of(PRODUCTS[0])
    other = Quantized(w.values, w.scales.at[4, 1].multiply(1.01), w.block, w.row_group)  # of the last group
    assert not within(run(PRODUCTS[0], x, other), rows, weights)
    unquantised = Quantized(w.values, w.scales, w.block)
    assert not within(by_xla(PRODUCTS[0], x, unquantised), rows, weights)


@pytest.mark.parametrize("run", [by_xla, kernel])
def test_nan_in_other_rows_stays_there(run):
    x, w, *_ = arrays_of(PRODUCTS[1])
    got, beside = (np.asarray(run(PRODUCTS[1], own, w)) for own in (x, x.at[1::2].set(jnp.nan)))
    assert got[::2].tobytes() == beside[::2].tobytes()
    assert np.isnan(beside[1::2]).all()


def test_xla_rounds_before_it_widens():
    """Without the barrier XLA multiplies a single row on a GPU as if it were not quantised."""
    w = Quantized(jnp.zeros((256, 128), FP8), jnp.ones((2, 1)), (128, 128), 128)
    x = jnp.zeros((1, 256), jnp.bfloat16)
    program = lower_for_gpu(partial(matmul, "bm,mf->bf", implementation="xla"), x, w)
    assert re.search(r"optimization_barrier .* : tensor<[0-9x]+xf8E4M3FN>", program)


class TestChoice:
    def test_what_kernels_cannot_do_is_said(self):
        x = jnp.zeros((1, 48), jnp.bfloat16)
        made = Quantized(jnp.zeros((48, 32), FP8), jnp.ones((3, 1)), (16, 32), 16)
        why = api.OPERATION.table["pallas_triton"].unsupported(x, made, "bm,mf->bf")
        assert why == "scales change after 16 terms, no multiple of 32"
        with pytest.raises(
            ValueError, match=r"bm,fm->bf: rows are quantised, and bm,fm->bf is not of the form"
        ):
            matmul("bm,fm->bf", x, made)

    @pytest.mark.parametrize(
        ("rows", "block", "dtype", "taken"),
        [
            (1, (128, 128), "bfloat16", KERNEL),
            (16, (128, 128), "bfloat16", KERNEL),
            (17, (128, 128), "bfloat16", MOSAIC),
            (1000, (128, 128), "float16", MOSAIC),
            (1000, (64, 128), "float16", KERNEL),
            (128, (128, 128), "float32", None),
            (1, (256, 1), "bfloat16", None),
        ],
    )
    def test_kernels_are_for_all_rows(self, rows, block, dtype, taken, monkeypatch):
        monkeypatch.setattr(api, "gpu_problem", lambda: None)
        monkeypatch.setattr("pallas_kernels.dispatch.gpu_problem", lambda: None)
        scales = jnp.ones(scale_shape((256, 256), block))
        w = Quantized(jnp.zeros((256, 256), FP8), scales, block, 128 if block[1] > 1 else 0)
        program = lower_for_gpu(partial(matmul, "bm,mf->bf"), jnp.zeros((rows, 256), dtype), w)
        names = {KERNEL: ["matmul_fp8_rows", "quantize_rows"], MOSAIC: ["quantize_rows"], None: []}
        assert sorted(launches(program).elements()) == names[taken]
        assert (MOSAIC in program) == (taken == MOSAIC)


class TestExperts:
    """Sizes are of tokens, experts of each, experts, model and features of an expert."""

    SIZES = 5, 2, 4, 160, 96

    def arrays(self, dtype=jnp.float32):
        rng = np.random.default_rng(4)
        t, k, e, m, i = self.SIZES
        gate_up = Quantized.of(
            jnp.asarray(rng.standard_normal((e, m, 2, i)) / 12, jnp.float32), (1, 64, 1, 32)
        )
        down = Quantized.of(jnp.asarray(rng.standard_normal((e, i, m)) / 10, jnp.float32), (1, 64, 64))
        weights = tuple(Quantized(w.values, w.scales, w.block, 64) for w in (gate_up, down))
        experts = np.stack([rng.permutation(e)[:k] for _ in range(t)]).astype(np.int32)
        experts[1] = -1, e
        x = jnp.asarray(rng.standard_normal((t, m)), dtype).at[1].set(jnp.nan)
        return x, *weights, jnp.asarray(experts), jnp.asarray(rng.random((t, k)), jnp.float32)

    def expected(self, x, gate_up, down, experts, weights):
        rows, up, out = quantised(x, 64)[2], widened(gate_up), widened(down)
        y = np.zeros(x.shape)
        for (t, k), e in np.ndenumerate(np.asarray(experts)):
            if 0 <= e < self.SIZES[2]:
                gate, value = np.einsum("m,mgi->gi", rows[t], up[e])
                hidden = (gate / (1 + np.exp(-gate)) * value)[None]
                assert at_no_boundary(hidden, 64)
                y[t] += np.asarray(weights, np.float64)[t, k] * (quantised(hidden, 64)[2][0] @ out[e])
        return y

    @pytest.mark.parametrize("name", ["xla", "pallas_triton"])
    def test_are_within_rounding_of_float64(self, name):
        arrays = self.arrays()
        if name == "xla":
            got = expert_mlp(*arrays, activation=SILU, implementation="xla")
        else:
            got = expert_kernel.expert_mlp(*arrays, None, None, activation=SILU, interpret=True)
        expected = self.expected(*arrays)
        distance = np.linalg.norm(np.asarray(got) - expected, axis=-1)
        assert (distance <= 2e-6 * np.linalg.norm(expected, axis=-1)).all()
        plain = [Quantized(w.values, w.scales, w.block) for w in arrays[1:3]]
        wide_rows = np.asarray(expert_mlp(arrays[0], *plain, *arrays[3:], activation=SILU))
        apart = np.linalg.norm(wide_rows - expected, axis=-1) / np.linalg.norm(expected + 1e-9, axis=-1)
        assert (apart[[0, 2, 3, 4]] > 1e-3).all()

    @pytest.mark.parametrize("tokens", [1, 64, 512])
    def test_lower_for_cuda(self, tokens, monkeypatch):
        monkeypatch.setattr("pallas_kernels.dispatch.gpu_problem", lambda: None)
        t, k, e, m, i = tokens, 8, 128, 2048, 768

        def run(x, up, up_scales, down, down_scales, experts, weights):
            gate_up = Quantized(up, up_scales, (1, 128, 1, 128), 128)
            down = Quantized(down, down_scales, (1, 128, 128), 128)
            assert expert_api.OPERATION.table["pallas_triton"].unsupported(x, gate_up, down) is None
            arrays = x, gate_up, down, experts, weights, None, None
            return expert_kernel.expert_mlp(*arrays, activation=SILU)

        shapes = [((t, m), jnp.bfloat16), ((e, m, 2, i), FP8), ((e, 16, 2, 6), jnp.float32)]
        shapes += [((e, i, m), FP8), ((e, 6, 16), jnp.float32), ((t, k), jnp.int32), ((t, k), jnp.float32)]
        program = lower_for_gpu(run, *(jax.ShapeDtypeStruct(*own) for own in shapes))
        products = {"expert_mlp_hidden": 1, "expert_mlp_output": 1, "quantize_rows": 2}
        assert launches(program) == products | ({"expert_mlp_rows": 1} if t > 1 else {})
