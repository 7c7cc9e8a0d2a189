"""Narrow weights as words in Triton kernels: all weights of a word are loaded and widened at once.

Tensor cores take two terms of a column from one register. Loaded as bytes, each weight would be a read of its
own from shared memory, and its conversion an instruction of the slowest unit. A word is one read, and
assembly gives two weights in a register: of FP8 in float16 by two instructions, of MXFP4 by three or four and
a product.

A word has four neighbouring columns of FP8, or four neighbouring terms of one column of MXFP4. Two words of
MXFP4 share a register, as their widened terms do. If a tile were joined of two, Triton would choose the
layout of narrower operands, and copy each register of rows for every product.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, UInt, UInt8, UInt16, UInt32

from pallas_kernels.mxfp4 import LARGEST_SCALE

#: Columns of a word of FP8.
COLUMNS = 4
#: Terms of a word of MXFP4.
TERMS = 4
# The exponents of bfloat16 start so much lower than those of e4m3.
_FP8_POWER = 2.0**120
# Added to the exponents of MXFP4's scales in bfloat16: the largest that a checkpoint may have becomes 254.
_MXFP4_SHIFT = 254 - LARGEST_SCALE
_MXFP4_FACTOR = 2.0 ** (_MXFP4_SHIFT - 126)


def words_of(numbers: Array, size: int) -> UInt[Array, "*others words"]:
    """Numbers of eight bits, [*others, N], as words of so many bytes; XLA:GPU moves nothing for it."""
    groups = numbers.reshape(*numbers.shape[:-1], -1, size)
    return jax.lax.bitcast_convert_type(groups, jnp.dtype(f"uint{8 * size}"))


def fp8_columns(words: UInt32[Array, "*shape"], dtype: jnp.dtype) -> list[Array]:
    """The weights in words of FP8, exactly: the first column of each word, the second, third and fourth.

    Only in float16 NaN stays NaN; otherwise it becomes 480 of its sign. Only a checkpoint loaded with
    ``allow_nonfinite`` has any.
    """
    if dtype == jnp.float16:
        shape = jax.ShapeDtypeStruct(words.shape, jnp.float16)
        return [_inline(fp8_widening(i), 2, shape, words) for i in range(COLUMNS)]
    power = jnp.bfloat16(_FP8_POWER)
    return [
        (jax.lax.bitcast_convert_type(bits, jnp.bfloat16) * power).astype(dtype) for bits in _fp8_bits(words)
    ]


def _fp8_bits(words: UInt32[Array, "*shape"]) -> tuple[Array, ...]:
    """Those columns as bits of bfloat16 that stand for 2**-120 times their value."""

    def halves(words: Array) -> tuple[Array, Array]:
        # Sign, four bits of exponent, three of mantissa: the sign stays where it is, the others move by four.
        moved = (words & jnp.uint32(0x80008000)) | ((words >> 4) & jnp.uint32(0x07F007F0))
        return moved.astype(jnp.uint16), (moved >> 16).astype(jnp.uint16)

    (first, third), (second, fourth) = halves(words << 8), halves(words)
    return first, second, third, fourth


def fp8_widening(i: int) -> str:
    """The assembly that widens the column i of two words, neighbouring terms, to halves of a register."""
    return f"""{{
.reg .b32 bytes;
.reg .b16 low, high;
prmt.b32 bytes, $1, $2, {0x40 + 0x11 * i:#x};
mov.b32 {{low, high}}, bytes;
cvt.rn.f16x2.e4m3x2 $0, low;
}}"""


def mxfp4_terms(words: UInt16[Array, "N W"], scales: UInt8[Array, "N B"], dtype: jnp.dtype) -> list[Array]:
    """The weights in words of MXFP4 times `mxfp4_factor`: the term i of each word, for each i.

    In bfloat16 and float32 they are exact with scales from 2**-100 to 2**33, the largest of checkpoints. With
    smaller ones they are rounded to multiples of 2**-101.
    """
    # Bytes of scales are exponents of bfloat16, and bits of values stand for 2**-126 times as much.
    powers = (scales.astype(jnp.uint16) + jnp.uint16(_MXFP4_SHIFT)) << jnp.uint16(7)
    spread = (*scales.shape, words.shape[1] // scales.shape[1])
    powers = jnp.broadcast_to(powers[:, :, None], spread).reshape(words.shape)
    shape = jax.ShapeDtypeStruct(words.shape, jnp.bfloat16)
    tiles = [_inline(mxfp4_widening(i), 2, shape, words, powers) for i in range(TERMS)]
    if dtype == jnp.bfloat16:
        return tiles
    return [(tile.astype(jnp.float32) * (1 / _MXFP4_FACTOR)).astype(dtype) for tile in tiles]


def mxfp4_factor(dtype: jnp.dtype) -> float:
    """What weights of a type are multiplied by: in bfloat16 one product widens them and applies the scale."""
    return _MXFP4_FACTOR if dtype == jnp.bfloat16 else 1.0


def mxfp4_widening(i: int) -> str:
    """The assembly that widens the term i of two words, in halves of a register, times powers.

    A product puts a term where its magnitude belongs, and once more where its sign does.
    """
    move = 4 * (i % 2)
    return f"""{{
.reg .b32 bits, zero;
{f"shr.u32 bits, $1, {4 * i - move};" if i >= 2 else "mov.b32 bits, $1;"}
and.b32 bits, bits, {0x000F000F << move:#x};
mul.lo.u32 bits, bits, {0x1040 >> move:#x};
and.b32 bits, bits, 0x81c081c0;
mov.b32 zero, 0x80008000;
fma.rn.bf16x2 $0, bits, $2, zero;
}}"""


def _inline(code: str, count: int, shape: jax.ShapeDtypeStruct, *arrays: Array) -> Array:
    """What assembly leaves in $0: for so many elements of each array at once, packed into registers."""
    inputs = ["r" for array in arrays for _ in range(count * array.dtype.itemsize // 4)]
    [result] = plgpu.elementwise_inline_asm(
        code, args=arrays, constraints=",".join(["=r", *inputs]), pack=count, result_shape_dtypes=[shape]
    )
    return result


def side_by_side(parts: Sequence[Array]) -> Array:
    """The matrix [rows, N] whose columns i, i + P, i + 2P, ... are part i of P, a power of two."""
    rows = parts[0].shape[0]
    while len(parts) > 1:
        half = len(parts) // 2
        parts = [jnp.stack(pair, axis=-1) for pair in zip(parts[:half], parts[half:], strict=True)]
    return parts[0].reshape(rows, -1)
