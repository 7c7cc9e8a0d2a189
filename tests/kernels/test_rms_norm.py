"""rms_norm against its definition in float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.differentiable import differentiable
from pallas_kernels.rms_norm import api, pallas_triton, reference, rms_norm
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

EPS = 1e-3  # large enough to matter
TOLERANCE = {jnp.float32: 1e-5, jnp.bfloat16: 1.2e-2, jnp.float16: 1.5e-3}  # three roundings
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
# Every dtype, and every shape in one of them: no axis but the rows', one element, sizes of no power of two.
CASES = [
    *(((5, 128), dtype) for dtype in TOLERANCE),
    ((96,), jnp.bfloat16),
    ((1, 1), jnp.float32),
    wide((2, 3, 96), jnp.float16),
    ((2, 1, 2, 1000), jnp.bfloat16),
]


def make_case(shape, dtype, weight_dtype=None, seed=0):
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.standard_normal(shape)

    x = normal(*shape) * np.exp(normal(*shape[:-1], 1))
    arrays = x, normal(shape[-1]), normal(*shape)
    dtypes = dtype, weight_dtype or dtype, dtype
    return tuple(a.astype(d) for a, d in zip(arrays, dtypes, strict=True))


def oracle(total, weight):
    total, weight = np.asarray(total, np.float64), np.asarray(weight, np.float64)
    return total / np.sqrt(np.mean(total * total, axis=-1, keepdims=True) + EPS) * weight


def with_and_without_delta(norm, x, weight, delta):
    return norm(x, weight, delta=delta), norm(x, weight, delta=None)


class RmsNormSuite:
    implementation: str

    @classmethod
    @cache
    def jitted(cls, offset, scale):
        norm = partial(
            rms_norm, eps=EPS, weight_offset=offset, weight_scale=scale, implementation=cls.implementation
        )

        return jax.jit(partial(with_and_without_delta, norm))

    def run(self, x, weight, delta, offset=None, scale=1.0):
        return self.jitted(offset, scale)(x, weight, delta)

    def check(self, x, weight, delta):
        for (normed, total), added in zip(self.run(x, weight, delta), (delta, None), strict=True):
            assert normed.shape == total.shape == x.shape
            assert normed.dtype == total.dtype == x.dtype
            # A sum of two 16-bit floats is exact in float32, or nearly so: it is rounded once.
            expected = x.astype(np.float32)
            if added is not None:
                expected = (expected + added.astype(np.float32)).astype(x.dtype)
            np.testing.assert_array_equal(total, expected)
            tolerance = TOLERANCE[x.dtype.type]
            expected = oracle(total, weight)
            np.testing.assert_allclose(np.asarray(normed, np.float64), expected, rtol=tolerance, atol=1e-7)

    @pytest.mark.parametrize(("shape", "dtype"), CASES)
    def test_oracle(self, shape, dtype):
        self.check(*make_case(shape, dtype))

    def test_a_wide_weight(self):
        x, weight, delta = make_case((5, 128), jnp.bfloat16, jnp.float32)
        (_, total), (normed, _) = self.run(x, weight, delta)
        x = np.asarray(x)
        exact = oracle(np.asarray(x), weight)
        assert normed.dtype == total.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(normed, np.float64), exact, rtol=2**-8)
        ones = np.ones_like(weight).astype(jnp.bfloat16)
        _, (y, _) = self.run(x, ones, delta)
        _, (narrow, _) = self.run(x, weight.astype(jnp.bfloat16), delta)
        np.testing.assert_array_equal(narrow, np.asarray(y) * weight.astype(jnp.bfloat16))
        assert np.any(np.asarray(narrow) != np.asarray(normed))

    @pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), wide(1.0, 1.0), (1.0, 0.3)])
    @pytest.mark.parametrize(
        ("dtype", "weight_dtype"),
        [(jnp.bfloat16, jnp.bfloat16), wide(jnp.float32, jnp.bfloat16), (jnp.bfloat16, jnp.float32)],
        ids=["narrow", "narrow weight", "narrow rows"],
    )
    def test_an_offset(self, dtype, weight_dtype, offset, scale):
        """Bit for bit as with the scaled sum, in float32, as the weight, and not as without one."""
        x, weight, delta = make_case((5, 128), dtype, weight_dtype)
        results = self.run(x, weight, delta, offset, scale)
        wide = self.run(x, scale * (offset + weight.astype(np.float32)), delta)
        jax.tree.map(np.testing.assert_array_equal, results, wide)
        same = np.array_equal(results[0][0], self.run(x, weight, delta)[0][0])
        assert same == (offset == 0 and jnp.float32 in (dtype, weight_dtype))

    @DTYPES
    def test_large_and_small(self, dtype):
        """Squares do not overflow or vanish in a 16-bit float; a row of zeros stays one."""
        x, weight, delta = make_case((5, 128), dtype)
        sizes = np.asarray([[1e3], [1e-3], [0], [1], [30]], dtype)
        self.check(x * sizes, weight, delta * sizes)

    def test_vmap(self):
        x, weight, delta = make_case((7, 40), jnp.float32)
        mapped = jax.vmap(self.run, in_axes=(0, None, 0))(x, weight, delta)
        for left, right in zip(
            jax.tree.leaves(mapped), jax.tree.leaves(self.run(x, weight, delta)), strict=True
        ):
            np.testing.assert_allclose(left, right, rtol=1e-6)


class TestXla(RmsNormSuite):
    implementation = "xla"

    @pytest.mark.parametrize("shape", [(0, 8), (2, 20000)])
    def test_sizes_that_a_kernel_refuses(self, shape):
        self.check(*make_case(shape, jnp.float32))


class TestPallasTritonInterpreted(RmsNormSuite):
    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        kernel = partial(pallas_triton.rms_norm, interpret=True)
        stand_in(api, differentiable(kernel, reference.rms_norm))

    @pytest.mark.parametrize(
        ("dtype", "weight_dtype", "offset"),
        [
            (jnp.float32, jnp.float32, None),
            (jnp.bfloat16, jnp.float32, None),
            (jnp.bfloat16, jnp.bfloat16, 1.0),
        ],
        ids=["float32", "bfloat16", "offset"],
    )
    def test_gradients(self, dtype, weight_dtype, offset):
        args = make_case((2, 3, 40), dtype, weight_dtype)

        def loss(run, *args):
            return sum(
                jnp.sum(jnp.sin(normed.astype(jnp.float32))) + jnp.sum(jnp.cos(total.astype(jnp.float32)))
                for normed, total in run(*args)
            )

        norm = partial(reference.rms_norm, eps=EPS, weight_offset=offset)
        gradients = [
            jax.jit(jax.grad(partial(loss, run), argnums=(0, 1, 2)))(*args)
            for run in (partial(self.run, offset=offset), partial(with_and_without_delta, norm))
        ]
        for one, other in zip(*gradients, strict=True):
            assert one.dtype == other.dtype
            one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
            np.testing.assert_allclose(one, other, rtol=0, atol=4 * TOLERANCE[dtype] * np.abs(other).max())


@pytest.mark.parametrize(
    ("shape", "dtype"), [((96,), jnp.float16), ((2, 128, 4096), jnp.bfloat16), ((3, 16384), jnp.float32)]
)
@pytest.mark.parametrize("with_delta", [True, False])
def test_lowers_for_cuda(with_delta, shape, dtype):
    x, weight = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[-1:], jnp.float32)
    norm = partial(pallas_triton.rms_norm, eps=EPS)
    assert lower_for_gpu(norm, x, weight, x if with_delta else None).count(KERNEL) == 1


def test_a_kernel_widens_its_weight():
    x, weight = jax.ShapeDtypeStruct((3, 128), jnp.bfloat16), jax.ShapeDtypeStruct((128,), jnp.bfloat16)
    program = lower_for_gpu(partial(pallas_triton.rms_norm, eps=EPS, weight_offset=1.0), x, weight, x)
    assert program.count(KERNEL) == 1
    assert "stablehlo.convert" not in program
    assert "stablehlo.add" not in program


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((128, 16384), None),
        ((128, 16385), "rows of 16385 elements are longer than 16384"),
        ((0, 8), "x has no elements"),
    ],
)
def test_unsupported_shape(shape, reason):
    assert pallas_triton.unsupported(jnp.zeros(shape)) == reason


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"x": jnp.float32(1)}, r"x must be \[..., M\], got a scalar"),
            ({"x": jnp.zeros((3, 8), jnp.int32)}, "x holds int32, expected float32, bfloat16, float16"),
            ({"weight": jnp.zeros(7)}, r"weight is \(7,\), expected \(8,\)"),
            ({"delta": jnp.zeros((3, 8), jnp.bfloat16)}, "delta holds bfloat16, expected float32"),
            ({"weight_scale": 0.5}, "weight_scale is 0.5 without a weight_offset, say 0.0"),
            ({"weight": jnp.zeros(7), "delta": jnp.zeros(8)}, r"weight is \(7,\).*delta is \(8,\)"),
        ],
    )
    def test_arrays(self, changes, message):
        call = {"x": jnp.zeros((3, 8)), "weight": jnp.zeros(8), "delta": jnp.zeros((3, 8))}
        with pytest.raises(ValueError, match=f"rms_norm: .*{message}"):
            rms_norm(**call | changes, eps=EPS)
