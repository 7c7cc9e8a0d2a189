"""Weights in MXFP4, packed: 4-bit values in blocks of 32 with a common power of two, as one record.

A byte is two values, the low four bits first; a value is a sign, two bits of exponent and one of mantissa
(e2m1). A block's scale is a byte ``s`` for ``2**(s - 127)`` (e8m0), where 255 is no number. bfloat16 holds
every product of the two exactly. Blocks lie along one axis of the weights, which comes last in memory::

    weights [E, M, 2, I]   axis 1   values [E, 2, I, M / 32, 16]   scales [E, 2, I, M / 32]

Source: OCP Microscaling Formats (MX) specification 1.0, and the layout of the published GPT-OSS checkpoints.
"""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, UInt8

#: Values that share a scale, and the bytes that hold them.
BLOCK = 32
BLOCK_BYTES = BLOCK // 2
# Halfway between neighbours of the values' magnitudes: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_HALFWAY = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
#: The largest scale that a checkpoint may have, 2**33: kernels have no room for larger ones (`weight_words`).
LARGEST_SCALE = 160


@functools.partial(jax.tree_util.register_dataclass, data_fields=("values", "scales"), meta_fields=("axis",))
@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Weights in MXFP4; what they stand for is value times scale.

    Attributes:
        values: Two to a byte, [*others, G, 16], where others are the weights' axes but for `axis`.
        scales: One for each of the G blocks along `axis`, [*others, G].
        axis: The axis of the weights that the blocks lie along.
    """

    values: UInt8[Array, "*others G 16"]
    scales: UInt8[Array, "*others G"]
    axis: int

    @classmethod
    def of(cls, weights: Float[Array, "*shape"], axis: int) -> "Mxfp4":
        """Quantises weights, of whole blocks along `axis`, to the nearest values.

        A block's largest magnitude is at least 4 times its scale.
        """
        rows = jnp.moveaxis(weights.astype(jnp.float32), axis, -1)
        blocks = rows.reshape(*rows.shape[:-1], -1, BLOCK)
        # 2**(e - 1) <= largest < 2**e
        _, e = jnp.frexp(jnp.max(jnp.abs(blocks), axis=-1))
        exponent = jnp.clip(e - 3, -126, LARGEST_SCALE - 127)
        magnitude = jnp.ldexp(jnp.abs(blocks), -exponent[..., None])
        codes = jnp.searchsorted(jnp.asarray(_HALFWAY), magnitude).astype(jnp.uint8)
        codes |= (blocks < 0).astype(jnp.uint8) << 3
        values = codes[..., ::2] | codes[..., 1::2] << 4
        return cls(values, (exponent + 127).astype(jnp.uint8), axis)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weights."""
        *others, blocks = self.scales.shape
        return (*others[: self.axis], blocks * BLOCK, *others[self.axis :])

    @property
    def block(self) -> tuple[int, ...]:
        """Values that share a scale, along each axis of the weights."""
        return tuple(BLOCK if axis == self.axis else 1 for axis in range(self.scales.ndim))

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    def __getitem__(self, index: Array | int) -> "Mxfp4":
        """One entry of the first axis, which is not that of the blocks."""
        assert self.axis > 0, "an entry of the axis that the blocks lie along"
        return Mxfp4(self.values[index], self.scales[index], self.axis - 1)

    def cut(self, axis: int, start: Array | int, count: int) -> "Mxfp4":
        """Some weights of an axis, from ``start`` on, which is not that of the blocks."""
        assert axis != self.axis, "a part of the axis that the blocks lie along"
        place = axis - (axis > self.axis)
        values, scales = (
            jax.lax.dynamic_slice_in_dim(own, start, count, place) for own in (self.values, self.scales)
        )
        return Mxfp4(values, scales, self.axis)

    def widened(self, dtype: jnp.dtype) -> Float[Array, "*shape"]:
        """The weights in another type, which float32 and bfloat16 hold exactly."""
        pairs = jnp.stack([self.values & 15, self.values >> 4], axis=-1)
        codes = pairs.reshape(*self.scales.shape, BLOCK).astype(jnp.int32)
        bits = _bfloat16_bits(codes, self.scales.astype(jnp.int32)[..., None])
        if dtype == jnp.bfloat16:
            wide = jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)
        else:
            wide = jax.lax.bitcast_convert_type(bits.astype(jnp.uint32) << 16, jnp.float32).astype(dtype)
        rows = wide.reshape(*self.scales.shape[:-1], -1)
        return jnp.moveaxis(rows, -1, self.axis)


def _bfloat16_bits(codes: Int32[Array, "*shape"], scales: Int32[Array, "*#shape"]) -> Int32[Array, "*shape"]:
    """The bits of bfloat16 values, by integers alone: XLA:CPU would round the smallest ones to zero."""
    magnitude = codes & 7
    # 0.5 is a power of two, as the format's only value below its smallest exponent.
    mantissa = jnp.where(magnitude > 1, (magnitude & 1) << 6, 0)
    exponent = scales + (magnitude >> 1) - 1
    normal, small = (exponent << 7) | mantissa, (0x80 | mantissa) >> jnp.clip(1 - exponent, 0, 7)
    positive = jnp.where(magnitude == 0, 0, jnp.where(exponent > 0, normal, small))
    return positive | (codes & 8) << 12
