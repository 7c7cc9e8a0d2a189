"""matmul: products of rows with FP8 weights, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import implementations, matmul, reference
from pallas_kernels.quantized import FP8, LARGEST, Quantized

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
@pytest.mark.parametrize("implementation", implementations())
def test_every_output_is_within_rounding_of_float64(implementation, name, parts, monkeypatch):
    if parts == "parts":
        monkeypatch.setattr(reference, "_PART", 5000)
    dtype = jnp.bfloat16 if parts == "whole" else jnp.float32
    spec, shape, block = CASES[name]
    w = make(shape, block)
    summed = len(spec.split(",")[1].split("->")[0].strip()) - len(spec.split("->")[1]) + 2
    rows = np.random.default_rng(1).standard_normal((1, 3, *shape[:summed]))
    x = jnp.asarray(rows, dtype)
    got = np.asarray(matmul(spec, x, w, implementation=implementation), np.float64)
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

    def rounds(weights, x):
        def turn(_, x):
            for w in weights:
                x = matmul("bm,mf->bf", x, w)
            return x / 1000

        return jax.lax.fori_loop(0, 3, turn, x)

    compiled = jax.jit(rounds).lower(weights, jnp.ones((2, size))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1.2 * count * size * size


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
