"""Parts of the Mosaic kernel below what Pallas offers: FP8 to bfloat16 in shared memory, and sums to memory.

Both are written for a warpgroup, thread by thread. Shared memory is swizzled, as its transforms say, so that
neither rows nor columns fall into the same banks: of 16-byte chunks, c of row r lies in the place of

    c ^ (r // 2 % 4)   where rows have 64 bytes (FP8)
    c ^ (r % 8)        where they have 128 (bfloat16)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

#: Columns of a warpgroup: tensor cores take 64 rows of the transposed weights.
COLUMNS = 64
# Multiplies scales, as the bits of weights below stand for 2**-120 times their value.
_POWER = 2.0**120
# Scales from here on could become infinite, so the power multiplies the weights first.
_LARGE_SCALE = 2.0**7

# From JAX 0.12 type checkers take these two classes for abstract.
_Tiling: Any = plgpu.TilingTransform
_Swizzle: Any = plgpu.SwizzleTransform
FP8_TRANSFORMS = (_Tiling((8, 64)), _Swizzle(64))
FP8_TERMS_TRANSFORMS = (_Tiling((8, 128)), _Swizzle(128))
WIDE_TRANSFORMS = (_Tiling((8, 64)), _Swizzle(128))

_THREADS = 128
_CHUNK = 16  # bytes
# Rows of weights that a warpgroup reads at once, a chunk for each thread.
_ROWS = _THREADS * _CHUNK // COLUMNS
# A scale as the sum of two numbers of bfloat16, each twice: 17 bits of it.
_SPLIT_SCALE = """{
.reg .b32 high, low;
cvt.rn.bf16x2.f32 $0, $2, $2;
shl.b32 high, $0, 16;
sub.f32 low, $2, high;
cvt.rn.bf16x2.f32 $1, low, low;
}"""
# Two bytes of a word times a scale, rounded once: as the selector says they become the upper ones of two
# halves. Sign, four bits of exponent and three of mantissa move to where bfloat16 has them, with exponents
# that are smaller by 120; zero and subnormal values too.
_WIDEN_PAIR = """{{
.reg .b32 bits, moved;
prmt.b32 bits, $1, $1, {selector};
shr.u32 moved, bits, 4;
and.b32 moved, moved, 0x07f007f0;
lop3.b32 bits, bits, 0x80008000, moved, 0xea;
{large}mul.bf16x2 moved, bits, $3;
fma.rn.bf16x2 $0, bits, $2, moved;
}}"""
_SELECTORS = ("0x1000", "0x3020")
# Both halves of the second register are 2**120 in bfloat16.
_TIMES_POWER = "mov.b32 moved, 0x7b807b80;\nmul.bf16x2 bits, bits, moved;\n"


def widen(values_ref: Any, scale: jax.Array, out_ref: Any) -> None:
    """Weights [depth, 64] in FP8 times `scale`, each rounded once, to bfloat16 in shared memory.

    The caller must fence the writes and wait for all threads before it reads them.
    """
    write = functools.partial(_widen, values_ref, scale, out_ref)
    # The same branch for all threads; NaN is large.
    jax.lax.cond(
        scale < _LARGE_SCALE, functools.partial(write, large=False), functools.partial(write, large=True)
    )


def _widen(values_ref: Any, scale: jax.Array, out_ref: Any, *, large: bool) -> None:
    """`widen` for scales on one side of `_LARGE_SCALE`."""
    depth = values_ref.shape[-2]
    codes = [widening(selector, large=large) for selector in _SELECTORS]
    types = plgpu.RefType(FP8_TRANSFORMS), plgpu.RefType(WIDE_TRANSFORMS), plgpu.Layout.WG_SPLAT

    def write(_: Any, values: Any, out: Any, scales: Any) -> None:
        pair = llvm.StructType.get_literal([_i32(), _i32()])
        factor: Any = scales.registers.item()
        split: Any = llvm.inline_asm(pair, [factor], _SPLIT_SCALE, "=r,=r,f", asm_dialect=0)
        high_low = [llvm.extractvalue(_i32(), split, [i]) for i in range(2)]
        thread = _thread()
        row, chunk = arith.shrui(thread, _int(2)), arith.andi(thread, _int(3))
        place = arith.xori(chunk, arith.andi(arith.shrui(row, _int(1)), _int(3)))
        source = _offset(utils.memref_ptr(values), _sum(_times(row, COLUMNS), _times(place, _CHUNK)))
        # A chunk of FP8 becomes two neighbouring ones.
        turn = arith.andi(row, _int(7))
        places = [
            _offset(
                utils.memref_ptr(out), _sum(_times(row, 2 * COLUMNS), _times(arith.xori(at, turn), _CHUNK))
            )
            for at in (_times(chunk, 2), _sum(_times(chunk, 2), _int(1)))
        ]
        words = ir.VectorType.get((4,), _i32())
        starts = range(0, depth, _ROWS)
        loaded = [llvm.load(words, _offset(source, at * COLUMNS), alignment=_CHUNK) for at in starts]
        for at, four in zip(starts, loaded, strict=True):
            for i, start in enumerate(places):
                own = [_element(four, j) for j in (2 * i, 2 * i + 1)]
                wide = [_widened(word, code, high_low) for word in own for code in codes]
                there = _offset(start, at * 2 * COLUMNS)
                llvm.store(vector.from_elements(words, wide), there, alignment=_CHUNK)

    factor = scale if large else scale * jnp.float32(_POWER)
    splat = plgpu.layout_cast(jnp.full((_THREADS,), factor, jnp.float32), plgpu.Layout.WG_SPLAT)
    plgpu.inline_mgpu(arg_types=types)(write)(values_ref, out_ref, splat)


def store_transposed(sums: jax.Array, out_ref: Any) -> None:
    """Writes sums [64, rows] of `Layout.WGMMA` to memory, [rows, 64] of an array with more columns."""
    rows, stride, dtype = sums.shape[1], out_ref.ref.shape[-1], jnp.dtype(out_ref.dtype)

    def write(_: Any, out: Any, array: Any) -> None:
        # A thread of a warp has, of each 16 rows of sums, two that are eight apart, and of each eight columns
        # two neighbouring ones.
        thread = _thread()
        warp, lane = arith.shrui(thread, _int(5)), arith.andi(thread, _int(31))
        column = _sum(_times(warp, 16), arith.shrui(lane, _int(2)))
        row = _times(arith.andi(lane, _int(3)), 2)
        start = arith.extui(ir.IntegerType.get_signless(64), _sum(_times(row, stride), column))
        size = dtype.itemsize
        place = _offset(utils.memref_ptr(out), arith.muli(start, utils.c(size, start.type)))
        for (eight, half), pair in np.ndenumerate(array.registers.reshape(rows // 8, 2)):
            for i in range(2):
                value = _element(pair, i)
                if dtype != jnp.float32:
                    value = arith.truncf(utils.dtype_to_ir_type(dtype), value)
                at = (8 * eight + i) * stride + 8 * half
                llvm.store(value, _offset(place, at * size), alignment=size)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(write)(out_ref, sums)


def _widened(word: Any, code: str, high_low: list[Any]) -> Any:
    """A register of two values of a word, times the scale."""
    return llvm.inline_asm(_i32(), [word, *high_low], code, "=r,r,r,r", asm_dialect=0)


def widening(selector: str, *, large: bool) -> str:
    """The assembly that widens two bytes of a word, for scales on one side of `_LARGE_SCALE`."""
    return _WIDEN_PAIR.format(selector=selector, large=_TIMES_POWER if large else "")


def _thread() -> Any:
    """The number of the thread in its warpgroup."""
    return arith.remui(utils.thread_idx(), _int(_THREADS))


def _i32() -> Any:
    return ir.IntegerType.get_signless(32)


def _int(value: int) -> Any:
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value))


def _times(value: Any, factor: int) -> Any:
    return arith.muli(value, _int(factor))


def _sum(first: Any, second: Any) -> Any:
    return arith.addi(first, second)


def _element(array: Any, i: int) -> Any:
    return vector.extract(array, dynamic_position=[], static_position=[i])


def _offset(pointer: Any, offset: Any) -> Any:
    """So many bytes further on."""
    dynamic = -(2**31)  # marks an offset that is no constant
    values, constants = ([], [offset]) if isinstance(offset, int) else ([offset], [dynamic])
    byte = ir.IntegerType.get_signless(8)
    return llvm.getelementptr(pointer.type, pointer, values, constants, byte, llvm.GEPNoWrapFlags.none)
