"""Parts of the Mosaic kernel below what Pallas offers: FP8 to bfloat16 in shared memory, and sums to memory.

Both are written for a warpgroup, thread by thread. Shared memory is swizzled in rows of 128 bytes, as its
transforms say: 16-byte chunk c of row r lies in the place of chunk c ^ (r % 8), so that neither a row nor a
column of chunks falls into the same banks.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

#: Columns of a warpgroup: a row of FP8 is one row of a swizzle.
COLUMNS = 128
#: Multiplies scales, as the weights below stand for 2**-120 times their value.
POWER = 2.0**120

FP8_TRANSFORMS = (plgpu.TilingTransform((8, 128)), plgpu.SwizzleTransform(128))
WIDE_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_THREADS = 128
_CHUNK, _ROW, _TILE = 16, 128, 1024  # bytes of a chunk, of a swizzle's row, and of its eight rows
# Rows of FP8 that a warpgroup reads at once, a chunk for each thread.
_ROWS_AT_ONCE = _THREADS * _CHUNK // _ROW
# Four values, one in each byte of a word, times a scale. Sign, four bits of exponent and three of mantissa
# move to where float32 has them, with exponents that are smaller by 120; zero and subnormal values too.
_WIDEN_WORD = """{
.reg .b32 a, b, c, d;
shl.b32 a, $2, 24;
shl.b32 b, $2, 16;
shl.b32 c, $2, 8;
shr.s32 a, a, 4;
shr.s32 b, b, 4;
shr.s32 c, c, 4;
shr.s32 d, $2, 4;
and.b32 a, a, 0x87f00000;
and.b32 b, b, 0x87f00000;
and.b32 c, c, 0x87f00000;
and.b32 d, d, 0x87f00000;
mul.rn.f32 a, a, $3;
mul.rn.f32 b, b, $3;
mul.rn.f32 c, c, $3;
mul.rn.f32 d, d, $3;
cvt.rn.bf16x2.f32 $0, b, a;
cvt.rn.bf16x2.f32 $1, d, c;
}"""


def widen(values_ref: Any, scale: jax.Array, out_ref: Any) -> None:
    """Weights [depth, 128] in FP8 times `scale` / 2**120, each rounded once, to bfloat16 in shared memory.

    The caller must fence the writes and wait for all threads before it reads them.
    """
    depth = values_ref.shape[-2]

    types = plgpu.RefType(FP8_TRANSFORMS), plgpu.RefType(WIDE_TRANSFORMS), plgpu.Layout.WG_SPLAT

    def write(_: Any, values: Any, out: Any, scales: Any) -> None:
        factor = scales.registers.item()
        thread = _thread()
        row, chunk = arith.shrui(thread, _int(3)), arith.andi(thread, _int(7))
        turn = arith.andi(row, _int(7))
        source = _offset(
            utils.memref_ptr(values), _sum(_times(row, _ROW), _times(arith.xori(chunk, turn), _CHUNK))
        )
        # A chunk of FP8 becomes two neighbouring ones. Half of the threads write the second one first: with
        # the first ones of the others these are the eight chunks of a row.
        tile, first = arith.shrui(chunk, _int(2)), _times(arith.andi(chunk, _int(3)), 2)
        eight = _times(arith.shrui(row, _int(3)), 2 * _TILE)
        start = _sum(_sum(eight, _times(tile, _TILE)), _times(turn, _ROW))
        swapped = arith.cmpi(arith.CmpIPredicate.ne, tile, _int(0))
        places = [
            _offset(utils.memref_ptr(out), _sum(start, _times(arith.xori(_sum(first, half), turn), _CHUNK)))
            for half in (tile, arith.xori(tile, _int(1)))
        ]
        words = ir.VectorType.get((4,), _i32())
        loaded = [
            llvm.load(words, _offset(source, at * _ROW), alignment=_CHUNK)
            for at in range(0, depth, _ROWS_AT_ONCE)
        ]
        for i, chunk_words in enumerate(loaded):
            own = [_element(chunk_words, j) for j in range(4)]
            ahead = [arith.select(swapped, own[(j + 2) % 4], own[j]) for j in range(4)]
            for place, pair in zip(places, (ahead[:2], ahead[2:]), strict=True):
                wide = [half for word in pair for half in _widened(word, factor)]
                at = i * _ROWS_AT_ONCE * 2 * _ROW
                llvm.store(vector.from_elements(words, wide), _offset(place, at), alignment=_CHUNK)

    splat = plgpu.layout_cast(jnp.full((_THREADS,), scale, jnp.float32), plgpu.Layout.WG_SPLAT)
    plgpu.inline_mgpu(arg_types=types)(write)(values_ref, out_ref, splat)


def store_transposed(sums: jax.Array, out_ref: Any) -> None:
    """Writes sums [128, rows] of `Layout.WGMMA` to memory, [rows, 128] of an array with more columns."""
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
        registers = array.registers.reshape(COLUMNS // 64, rows // 8, 2)
        for (block, eight, half), pair in np.ndenumerate(registers):
            for i in range(2):
                value = _element(pair, i)
                if dtype != jnp.float32:
                    value = arith.truncf(utils.dtype_to_ir_type(dtype), value)
                at = (8 * eight + i) * stride + 64 * block + 8 * half
                llvm.store(value, _offset(place, at * size), alignment=size)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(write)(out_ref, sums)


def _widened(word: Any, factor: Any) -> list[Any]:
    """Two registers of two values each."""
    pair = llvm.StructType.get_literal([_i32(), _i32()])
    both: Any = llvm.inline_asm(pair, [word, factor], _WIDEN_WORD, "=r,=r,r,f", asm_dialect=0)
    return [llvm.extractvalue(_i32(), both, [i]) for i in range(2)]


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
