"""Weights in FP8 as 32-bit words in Triton kernels: four neighbouring columns are loaded and widened at once.

Tensor cores want neighbouring terms of a column in one register, but in memory columns are neighbours. Loaded
as bytes, each weight would be a read of its own from shared memory, and its conversion an instruction of the
slowest unit. A word is one read, three operations give two weights, and the compiler joins terms with one
more for two.

Shapes: K terms, N columns.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

#: Columns of a word.
WORD = 4
# The exponents of bfloat16 start so much lower than those of e4m3.
_POWER = 2.0**120


def words_of(values: Array) -> UInt32[Array, "*terms words"]:
    """FP8 values [*terms, N] as words [*terms, N / 4]; XLA:GPU moves nothing for it."""
    groups = values.reshape(*values.shape[:-1], -1, WORD)
    return jax.lax.bitcast_convert_type(groups, jnp.uint32)


def columns_of(words: UInt32[Array, "*shape"], dtype: jnp.dtype) -> tuple[Array, ...]:
    """The weights in words: those of the first column of each word, of the second, third and fourth.

    Every finite value is exact. NaN, which only a checkpoint loaded with ``allow_nonfinite`` has, becomes
    480 of its sign.
    """
    first, third = _pair(words << 8)
    second, fourth = _pair(words)
    return tuple(_widened(half, dtype) for half in (first, second, third, fourth))


def _pair(words: UInt32[Array, "*shape"]) -> tuple[Array, Array]:
    """The second and the fourth bytes, as bits of bfloat16 that stand for 2**-120 times their value."""
    # Sign, four bits of exponent, three of mantissa: the sign stays where it is, the others move by four.
    bits = (words & jnp.uint32(0x80008000)) | ((words >> 4) & jnp.uint32(0x07F007F0))
    return bits.astype(jnp.uint16), (bits >> 16).astype(jnp.uint16)


def _widened(bits: Array, dtype: jnp.dtype) -> Array:
    """The values that bits of bfloat16 stand for, times 2**120, in another type."""
    values = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)
    return (values * jnp.bfloat16(_POWER)).astype(dtype)


def side_by_side(columns: tuple[Array, ...]) -> Array:
    """The matrix [rows, N] of the first columns of all words, the second, third and fourth, [rows, N / 4]."""
    first, second, third, fourth = columns
    pairs = [jnp.stack(pair, axis=-1) for pair in ((first, third), (second, fourth))]
    return jnp.stack(pairs, axis=-1).reshape(first.shape[0], -1)
