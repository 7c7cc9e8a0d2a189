"""Narrow weights as 32-bit words in Triton kernels: all weights of a word are loaded and widened at once.

Tensor cores take two terms of a column from one register. Loaded as bytes, each weight would be a read of its
own from shared memory, and its conversion an instruction of the slowest unit. A word is one read, three or
four integer operations give two weights, and the compiler joins neighbouring terms with one more for two.

A word has four neighbouring columns of FP8, or eight neighbouring terms of one column of MXFP4.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, UInt8, UInt32

#: Columns of a word of FP8.
COLUMNS = 4
#: Terms of a word of MXFP4.
TERMS = 8
# The exponents of bfloat16 start so much lower than those of e4m3.
_FP8_POWER = 2.0**120


def words_of(numbers: Array) -> UInt32[Array, "*others words"]:
    """Numbers of eight bits, [*others, N], as words [*others, N / 4]; XLA:GPU moves nothing for it."""
    groups = numbers.reshape(*numbers.shape[:-1], -1, 4)
    return jax.lax.bitcast_convert_type(groups, jnp.uint32)


def fp8_columns(words: UInt32[Array, "*shape"], dtype: jnp.dtype) -> list[Array]:
    """The weights in words of FP8: the first column of each word, the second, third and fourth.

    Every finite value is exact. NaN, which only a checkpoint loaded with ``allow_nonfinite`` has, becomes
    480 of its sign.
    """
    power = jnp.bfloat16(_FP8_POWER)
    return [
        (jax.lax.bitcast_convert_type(bits, jnp.bfloat16) * power).astype(dtype) for bits in fp8_bits(words)
    ]


def fp8_bits(words: UInt32[Array, "*shape"]) -> tuple[Array, ...]:
    """Those columns as bits of bfloat16 that stand for 2**-120 times their value."""

    # Sign, four bits of exponent, three of mantissa: the sign stays where it is, the others move by four.
    def second_and_fourth(words: Array) -> tuple[Array, Array]:
        return _halves((words & jnp.uint32(0x80008000)) | ((words >> 4) & jnp.uint32(0x07F007F0)))

    (first, third), (second, fourth) = second_and_fourth(words << 8), second_and_fourth(words)
    return first, second, third, fourth


def mxfp4_terms(
    words: UInt32[Array, "*shape"], powers: BFloat16[Array, "*shape"], dtype: jnp.dtype
) -> list[Array]:
    """The weights in words of MXFP4: the first term of each word, the second and so on to the eighth.

    They are exact, with scales from 2**-126 on. Only XLA:CPU, to which subnormal numbers are zero, takes 0.5
    for 0 in bfloat16. Other types get their weights from float16, whose subnormal numbers float32 has as
    normal ones.
    """
    half, wide = (jnp.bfloat16,) * 2 if dtype == jnp.bfloat16 else (jnp.float16, jnp.float32)
    lowest = wide(2.0 ** -int(jnp.finfo(half).minexp))
    return [
        (jax.lax.bitcast_convert_type(bits, half).astype(wide) * lowest * powers.astype(wide)).astype(dtype)
        for bits in mxfp4_bits(words, half)
    ]


def mxfp4_powers(scales: UInt8[Array, "*shape"]) -> BFloat16[Array, "*shape"]:
    """What scales of MXFP4 stand for; their bytes are the exponents of bfloat16."""
    return jax.lax.bitcast_convert_type(scales.astype(jnp.uint16) << 7, jnp.bfloat16)


def mxfp4_bits(words: UInt32[Array, "*shape"], half: Any) -> tuple[Array, ...]:
    """Those terms as bits of a type of 16 bits, for their value times its smallest normal number."""
    # Sign, two bits of exponent, one of mantissa.
    place = int(jnp.finfo(half).nmant) - 1
    magnitude = jnp.uint32(0x00070007 << place)

    def pair(i: int) -> tuple[Array, Array]:
        """The terms i and i + 4, which are as far apart as the halves of a word."""
        move = place - 4 * i
        moved = words << move if move >= 0 else words >> -move
        return _halves(((words << 12 - 4 * i) & jnp.uint32(0x80008000)) | (moved & magnitude))

    early, late = zip(*(pair(i) for i in range(TERMS // 2)), strict=True)
    return *early, *late


def side_by_side(parts: Sequence[Array]) -> Array:
    """The matrix [rows, N] whose columns i, i + P, i + 2P, ... are part i of P, a power of two."""
    rows = parts[0].shape[0]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [jnp.stack(pair, axis=-1) for pair in zip(parts[:half], parts[half:], strict=True)]
    return parts[0].reshape(rows, -1)


def _halves(words: UInt32[Array, "*shape"]) -> tuple[Array, Array]:
    """The lower and the upper 16 bits."""
    return words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)
