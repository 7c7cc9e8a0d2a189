"""MXFP4 as a record: every code with every scale, and parts of weights."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.matmul import matmul, reference
from pallas_kernels.mxfp4 import LARGEST_SCALE, Mxfp4

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: By the definition of e2m1, of all 16 codes.
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])


def random_mxfp4(shape, axis, seed=0, scales=(120, 126)):
    rng = np.random.default_rng(seed)
    cells = (*shape[:axis], *shape[axis + 1 :], shape[axis] // 32)
    values = rng.integers(256, size=(*cells, 16), dtype=np.uint8)
    return Mxfp4(jnp.asarray(values), jnp.asarray(rng.integers(*scales, size=cells, dtype=np.uint8)), axis)


def widened(w):
    """The weights in float64, value by value."""
    values, scales = np.asarray(w.values), np.asarray(w.scales).astype(np.float64)
    pairs = np.stack([VALUES[values & 15], VALUES[values >> 4]], axis=-1)
    wide = pairs.reshape(*scales.shape, 32) * 2.0 ** (scales[..., None] - 127)
    return np.moveaxis(wide.reshape(*scales.shape[:-1], -1), -1, w.axis)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_every_byte_with_every_scale(dtype):
    """Bit for bit, the values below the smallest normal one and both zeros too."""
    values = np.tile(np.arange(256, dtype=np.uint8).reshape(16, 16), (LARGEST_SCALE + 1, 1, 1))
    scales = np.repeat(np.arange(LARGEST_SCALE + 1, dtype=np.uint8), 16).reshape(-1, 16)
    w = Mxfp4(jnp.asarray(values), jnp.asarray(scales), 1)
    assert w.shape == (LARGEST_SCALE + 1, 512)
    got = np.asarray(jax.jit(lambda w: w.widened(jnp.dtype(dtype)))(w))
    expected = widened(w)
    if dtype == jnp.float16:
        # XLA rounds what is smaller than its smallest normal value to zero.
        inside = (abs(expected) >= 2.0**-14) & (abs(expected) <= 65504)
        np.testing.assert_array_equal(got[inside], expected[inside].astype(np.float16))
    else:
        bits = {2: np.uint16, 4: np.uint32}[got.itemsize]
        exact = expected.astype(ml_dtypes.bfloat16 if got.itemsize == 2 else np.float32)
        np.testing.assert_array_equal(got.view(bits), exact.view(bits))


FLOAT32 = jnp.dtype(jnp.float32)


def test_axes_and_parts():
    weights = [random_mxfp4((64, 96, 32), axis) for axis in range(3)]
    for axis, w in enumerate(weights):
        assert (w.shape, w.size) == ((64, 96, 32), 64 * 96 * 32)
        assert w.block == tuple(32 if i == axis else 1 for i in range(3))
    own = random_mxfp4((3, 64, 2, 8), 1)

    @jax.jit  # one program, not one for each operation
    def found():
        parts = own[2], own[1].cut(2, 4, 3), own.cut(0, 1, 2)
        return [w.widened(FLOAT32) for w in (*weights, *parts)]

    wide = widened(own)
    expected = *map(widened, weights), wide[2], wide[1, :, :, 4:7], wide[1:]
    for got, exact in zip(found(), expected, strict=True):
        np.testing.assert_array_equal(got, exact)


def test_rows_have_derivatives():
    w = random_mxfp4((64, 48), 0)
    found = jax.jit(jax.grad(lambda x, w: jnp.sum(matmul("bm,mf->bf", x, w))))(jnp.ones((1, 64)), w)
    np.testing.assert_allclose(found[0], widened(w).sum(axis=1), rtol=1e-5, atol=1e-5)


def rounds(weights, x):
    def turn(_, x):
        for w in weights:
            x = matmul("bm,mf->bf", x, w)
        return x / 1000

    return jax.lax.fori_loop(0, 3, turn, x)


def test_a_loop_widens_a_part_at_a_time(monkeypatch):
    """As of FP8: what does not change is not widened before the loop."""
    monkeypatch.setattr(reference, "_PART", 2**12)
    weights = [random_mxfp4((256, 256), 0, seed) for seed in range(8)]

    compiled = jax.jit(rounds).lower(weights, jnp.ones((2, 256))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 8 * 256 * 256
