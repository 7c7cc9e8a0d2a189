"""gated_activation against its definition in float64."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.activation import SILU, Activation
from pallas_kernels.differentiable import differentiable
from pallas_kernels.gated_activation import api, gated_activation, pallas_triton, reference
from tests.kernels.activations import FORMULAS, GPT_OSS, NAMES
from tests.kernels.lowering import KERNEL, lower_for_gpu
from tests.marks import wide

TOLERANCE = {jnp.float32: 5e-6, jnp.bfloat16: 4e-3, jnp.float16: 5e-4}  # one rounding, at most half a step
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: dtype.__name__)
# Every dtype, and every shape in one of them: no rows, one feature, a chunk, two, and some of another.
CASES = [
    *(((3, 2, 1100), dtype) for dtype in TOLERANCE),
    ((2, 40), jnp.bfloat16),
    ((1, 2, 1), jnp.float32),
    ((2, 3, 2, 40), jnp.float16),
    wide((1, 2, 1, 2, 2048), jnp.float32),
]


def make_case(shape, dtype):
    return (3 * np.random.default_rng(0).standard_normal(shape)).astype(dtype)


def oracle(gate_up, activation):
    gate, up = np.moveaxis(np.asarray(gate_up, np.float64), -2, 0)
    return FORMULAS[activation](gate, up)


class GatedActivationSuite:
    implementation: str

    @classmethod
    @cache
    def jitted(cls):
        run = partial(gated_activation, implementation=cls.implementation)
        return jax.jit(run, static_argnames="activation")

    def run(self, gate_up, activation=SILU):
        return self.jitted()(gate_up, activation=activation)

    def check(self, gate_up, activation=SILU):
        out = self.run(gate_up, activation)
        assert out.shape == (*gate_up.shape[:-2], gate_up.shape[-1])
        assert out.dtype == gate_up.dtype
        tolerance = TOLERANCE[gate_up.dtype.type]
        smallest = float(jnp.finfo(gate_up.dtype).smallest_normal)
        np.testing.assert_allclose(
            np.asarray(out, np.float64),
            oracle(gate_up, activation),
            rtol=tolerance,
            atol=max(smallest, 1e-30),
        )

    @pytest.mark.parametrize(("shape", "dtype"), CASES)
    def test_oracle(self, shape, dtype):
        self.check(make_case(shape, dtype))

    @pytest.mark.parametrize("activation", FORMULAS, ids=NAMES.get)
    def test_activations(self, activation):
        """Of gates that no formula nearly closes: there a rounded exponent counts for more."""
        self.check(np.clip(make_case((2, 2, 1100), jnp.float32), -2, None), activation)

    @DTYPES
    @pytest.mark.parametrize("activation", FORMULAS, ids=NAMES.get)
    def test_large_gates(self, activation, dtype):
        gate = np.asarray([-1e4, -1e3, -100, -88, 0, 20, 88, 100, 1e3, 1e4], dtype)
        gate = gate if activation == SILU else gate[gate != -88]  # which is nearly closed
        self.check(np.stack([gate, np.full_like(gate, 1.5)]), activation)

    def test_gradients_are_finite(self):
        """Also of gates that are closed."""
        gate = jnp.asarray([-1e4, -100, 0, 100, 1e4], jnp.float32)
        gate_up = jnp.stack([gate, jnp.full_like(gate, 1.5)])
        for activation in FORMULAS:
            gradient = jax.jit(jax.grad(lambda x, own=activation: jnp.sum(self.run(x, own))))(gate_up)
            assert np.isfinite(gradient).all(), NAMES[activation]

    def test_vmap(self):
        gate_up = make_case((1, 2, 1, 2, 2048), jnp.float32)
        np.testing.assert_allclose(jax.vmap(self.run)(gate_up), self.run(gate_up), rtol=1e-6)


class TestXla(GatedActivationSuite):
    implementation = "xla"

    def test_no_rows(self):
        self.check(make_case((0, 2, 40), jnp.float32))


class TestPallasTritonInterpreted(GatedActivationSuite):
    implementation = "pallas_triton"

    @pytest.fixture(autouse=True)
    def interpreted(self, stand_in):
        kernel = partial(pallas_triton.gated_activation, interpret=True)
        stand_in(api, differentiable(kernel, reference.gated_activation))

    @DTYPES
    def test_gradients(self, dtype):
        gate_up = make_case((2, 3, 2, 40), dtype)

        def loss(gate, gate_up):
            return jnp.sum(jnp.sin(gate(gate_up).astype(jnp.float32)))

        run = jax.jit(jax.grad(partial(loss, self.run)))(gate_up)
        expected = jax.jit(jax.grad(partial(loss, partial(reference.gated_activation, activation=SILU))))(
            gate_up
        )
        assert run.dtype == dtype
        run, expected = np.asarray(run, np.float64), np.asarray(expected, np.float64)
        np.testing.assert_allclose(run, expected, rtol=0, atol=8 * TOLERANCE[dtype] * np.abs(expected).max())


@pytest.mark.parametrize(
    ("shape", "dtype"), [((1, 2, 1), jnp.float32), *(((2, 128, 2, 12288), dtype) for dtype in TOLERANCE)]
)
def test_lowers_for_cuda(shape, dtype):
    gate_up = jax.ShapeDtypeStruct(shape, dtype)
    assert (
        lower_for_gpu(partial(pallas_triton.gated_activation, activation=GPT_OSS), gate_up).count(KERNEL) == 1
    )


def test_unsupported_shape():
    assert pallas_triton.unsupported(jnp.zeros((3, 2, 40))) is None
    assert pallas_triton.unsupported(jnp.zeros((0, 2, 40))) == "gate_up has no elements"


@pytest.mark.usefixtures("no_type_checks")
class TestRefusals:
    def test_activations(self):
        with pytest.raises(ValueError, match="Activation: limits must be gate or swish, not 'up'"):
            Activation(limit=7.0, limits="up")

    @pytest.mark.parametrize(
        ("gate_up", "message"),
        [
            (jnp.zeros((3, 8)), r"gate_up is \(3, 8\), expected \[..., 2, F\]"),
            (jnp.zeros((3, 8), jnp.int8), r"gate_up is \(3, 8\).*gate_up holds int8"),
        ],
    )
    def test_arrays(self, gate_up, message):
        with pytest.raises(ValueError, match=f"gated_activation: {message}"):
            gated_activation(gate_up)
