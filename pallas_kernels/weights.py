"""Weights as products take them: plain arrays, or records of fewer bits."""

import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.checks import Expected
from pallas_kernels.mxfp4 import BLOCK, BLOCK_BYTES, Mxfp4
from pallas_kernels.quantized import FP8, Quantized, scale_shape

#: Weights that are narrower than the rows that they multiply.
Narrow = Quantized | Mxfp4


def expected_weights(
    name: str, weights: Array | Narrow, shape: tuple[int, ...], dtype: jnp.dtype
) -> tuple[Expected, ...]:
    """What the arrays of weights of `shape` must be, for `checks.wrong_arrays`; `dtype` is of plain ones."""
    if isinstance(weights, Quantized):
        scales = scale_shape(weights.shape, weights.block)
        return (name, weights.values, shape, FP8), (f"{name}'s scales", weights.scales, scales, jnp.floating)
    if isinstance(weights, Mxfp4):
        cells = (*shape[: weights.axis], *shape[weights.axis + 1 :], -(-shape[weights.axis] // BLOCK))
        values = f"{name}'s values", weights.values, (*cells, BLOCK_BYTES), jnp.uint8
        return values, (f"{name}'s scales", weights.scales, cells, jnp.uint8)
    return ((name, weights, shape, dtype),)
