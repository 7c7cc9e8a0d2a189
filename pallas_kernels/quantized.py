"""Weights in FP8: a record of values and scales, one scale per block of values.

A block has a size along each axis of the weights. The scales have the same axes, with one entry per block;
the last block of an axis may be partial. Examples with blocks of 128 x 128, and of whole columns::

    values [300, 512]   block (128, 128)   scales [3, 4]
    values [300, 512]   block (300, 1)     scales [1, 512]

The rows that weights multiply may be quantised too, see `quantize_rows`.
"""

import functools
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

#: The type of the values: a sign, four bits of exponent and three of mantissa; finite but for two NaNs.
FP8 = jnp.dtype("float8_e4m3fn")
#: The largest value.
LARGEST = float(jnp.finfo(FP8).max)


def scale_shape(shape: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the scales of values of ``shape``."""
    return tuple(-(-size // unit) for size, unit in zip(shape, block, strict=True))


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("values", "scales"),
    meta_fields=("block", "row_group"),
)
@dataclass(frozen=True, slots=True)
class Quantized:
    """Weights in FP8; a weight is its value times its block's scale.

    Attributes:
        values: [*shape], of type `FP8`.
        scales: A float32 scale per block; see `scale_shape`.
        block: The block's size along each axis.
        row_group: Terms that share a scale in the rows that the weights multiply, which products quantise; 0
            is all terms. None: rows are not quantised.
    """

    values: Array
    scales: Array
    block: tuple[int, ...]
    row_group: int | None = None

    @classmethod
    def of(cls, weights: Float[Array, "*shape"], block: tuple[int, ...]) -> "Quantized":
        """Quantises weights: each block's largest magnitude becomes `LARGEST`, the others are rounded."""
        wide = weights.astype(jnp.float32)
        largest = jnp.abs(wide)
        for axis, (size, unit) in enumerate(zip(wide.shape, block, strict=True)):
            spare = [(0, -size % unit if i == axis else 0) for i in range(wide.ndim)]
            padded = jnp.pad(largest, spare)
            shape = (*padded.shape[:axis], -1, unit, *padded.shape[axis + 1 :])
            largest = jnp.max(padded.reshape(shape), axis=axis + 1)
        scales = largest / LARGEST
        # A block with a smaller scale is rounded to zeros, for which any scale will do.
        scales = jnp.where(scales >= jnp.finfo(scales.dtype).tiny, scales, 1)
        return cls((wide / _spread(scales, wide.shape, block)).astype(FP8), scales, block)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        return self.values.shape

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.values.size

    def __getitem__(self, index: Array | int) -> "Quantized":
        """An entry of the first axis, along which blocks must have size 1."""
        assert self.block[0] == 1, f"entries of blocks of {self.block[0]}"
        values = of_bits(bits_of(self.values)[index])
        return replace(self, values=values, scales=self.scales[index], block=self.block[1:])

    def cut(self, axis: int, start: Array | int, count: int) -> "Quantized":
        """The weights of ``count`` blocks of an axis from ``start`` on; the last block may be partial."""
        unit = self.block[axis]
        size = (
            count * unit if isinstance(start, Array) else min(count * unit, self.shape[axis] - start * unit)
        )
        values = jax.lax.dynamic_slice_in_dim(bits_of(self.values), start * unit, size, axis)
        scales = jax.lax.dynamic_slice_in_dim(self.scales, start, count, axis)
        return replace(self, values=of_bits(values), scales=scales)

    def widened(self, dtype: jnp.dtype) -> Float[Array, "*shape"]:
        """The weights in another type: value times scale in float32, rounded once."""
        scales = _spread(self.scales.astype(jnp.float32), self.shape, self.block)
        return (self.values.astype(jnp.float32) * scales).astype(dtype)


# XLA:CPU cannot move FP8: to slice values it would first widen all of them to float16.
def bits_of(values: Array) -> Array:
    """The bits of FP8 values, as integers."""
    return jax.lax.bitcast_convert_type(values, jnp.uint8)


def of_bits(bits: Array) -> Array:
    """The FP8 values of bits."""
    return jax.lax.bitcast_convert_type(bits, FP8)


def _spread(
    scales: Float32[Array, "*cells"], shape: tuple[int, ...], block: tuple[int, ...]
) -> Float32[Array, "..."]:
    """Scales repeated to the values' shape; an axis with one block keeps size 1, and broadcasts."""
    for axis, (size, unit) in enumerate(zip(shape, block, strict=True)):
        if scales.shape[axis] > 1 and unit > 1:
            scales = jax.lax.slice_in_dim(jnp.repeat(scales, unit, axis=axis), 0, size, axis=axis)
    return scales
