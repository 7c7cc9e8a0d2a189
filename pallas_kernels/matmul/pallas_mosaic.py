"""Products of rows and weights in FP8 on Pallas's Mosaic GPU backend, for Hopper.

A product is computed transposed, out[N, M] = W[N, K] · x[M, K]^T, because tensor cores take at least 64 rows
of their first operand: weights always fill them. A processor's program takes one share of the sums after
another. One of its warpgroups copies weights, rows and the rows' scales into a ring of buffers in shared
memory; the others multiply 64 columns each. The terms of a step share the scales of their row and their
column, which multiply the products of the step before they are added to the sums, in registers.

Shapes: M rows, K terms, N columns.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxtyping import Array, Float

from pallas_kernels.dispatch import compute_capability, device_kind, processors
from pallas_kernels.matmul.config import MosaicConfig, config_for
from pallas_kernels.matmul.problem import Problem, problem_of
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.quantized import FP8, Quantized
from pallas_kernels.weight_tiles import cell_of, row_group_of, with_terms_last
from pallas_kernels.weights import Narrow

#: Compute capability of the only GPUs that the kernel runs on.
HOPPER = (9, 0)
_DEPTH = 128  # terms of a step
_COLUMNS = 64  # of a warpgroup: tensor cores take 64 rows of the transposed weights
# From JAX 0.12 type checkers take these two classes for abstract.
_Tiling: Any = plgpu.TilingTransform
_Swizzle: Any = plgpu.SwizzleTransform
_TRANSFORMS = (_Tiling((8, _DEPTH)), _Swizzle(_DEPTH))
# Registers of a thread, by the number of warpgroups that multiply; the copying one takes few.
_REGISTERS = {2: 240, 3: 160}
_COPYING_REGISTERS = 24
_MOST_ROWS = 128  # of a tile: more do not fit into registers
_SHARED_BYTES = 226 << 10
_MOST_STAGES = 8
_COPIED_BYTES = 128  # a copy to shared memory has a multiple
_SCALES_AHEAD = 2  # steps
_FEWEST_STEPS = 2  # of a share
# Parts of sums, relative to weights: fitted to an earlier kernel, which had bfloat16 rows, on an H100.
_COST_OF_PARTS = 4


def unsupported(x: Array, w: Array | Narrow, spec: str) -> str | None:
    """Why the kernel cannot do a call."""
    if (capability := compute_capability()) is not None and capability != HOPPER:
        return f"it is for compute capability 9.0, not {'.'.join(map(str, capability))}"
    problem = problem_of(spec, x, w)
    if isinstance(problem, str):
        return problem
    group = row_group_of(w)
    if group is None:
        return f"it is for rows and weights in FP8, not for {problem.stored} weights alone"
    if group != _DEPTH:
        return f"{group or 'all'} terms of a row share a scale, not {_DEPTH}"
    _, depth, columns = problem.sizes
    for size, run, unit, what in (
        (depth, problem.depth_run, _DEPTH, "terms"),
        (columns, problem.columns_run, _COLUMNS, "columns"),
    ):
        if run % unit:
            return f"scales change after {run} {what}, no multiple of {unit}"
        if size % unit:
            return f"{size} {what}, no multiple of {unit}"
    if not _groups_of(columns):
        return f"{columns} columns, no multiple of {2 * _COLUMNS} or {3 * _COLUMNS}"
    return None


def _groups_of(columns: int) -> list[int]:
    """Numbers of warpgroups whose tiles divide the columns."""
    return [groups for groups in _REGISTERS if columns % (groups * _COLUMNS) == 0]


def default_config(rows: int, depth: int, columns: int) -> MosaicConfig:
    """The configuration that costs least: processors without work, and parts of sums in memory, cost time."""
    row_tiles = -(-rows // _MOST_ROWS)

    def cost(config: MosaicConfig) -> float:
        items = row_tiles * (columns // (config.groups * _COLUMNS)) * config.splits
        rounds = -(-items // processors())
        return (1 + _COST_OF_PARTS * config.splits * rows / depth) * rounds * processors() / items

    most = max(1, depth // _DEPTH // _FEWEST_STEPS)
    splits = range(1, min(most, processors()) + 1)
    return min((MosaicConfig(*own) for own in itertools.product(_groups_of(columns), splits)), key=cost)


@functools.partial(jax.jit, static_argnames=("spec", "wide", "config"))
def matmul(
    x: Float[Array, "*rows"],
    w: Quantized,
    *,
    spec: str,
    wide: bool,
    config: MosaicConfig | None = None,
) -> Float[Array, "*out"]:
    """See `api.matmul`. `config` overrides the rule's."""
    problem = problem_of(spec, x, w)
    assert isinstance(problem, Problem), problem
    rows, depth, columns = problem.sizes
    padded = -(-rows // 8) * 8 if rows <= _MOST_ROWS else -(-rows // _MOST_ROWS) * _MOST_ROWS
    out_dtype = jnp.dtype(jnp.float32) if wide else x.dtype
    config = config or config_for("pallas_mosaic", device_kind(), problem.stored, *problem.sizes)
    call = _Call.of(problem, padded, config or default_config(*problem.sizes))
    parts_dtype = out_dtype if call.splits == 1 else jnp.dtype(jnp.float32)
    length = padded + call.scales_width - call.block_rows
    values, row_scales = quantize_rows(x.reshape(rows, depth), _DEPTH, length=length)
    weights = with_terms_last(w.values.reshape(depth, columns), 0)
    scales = problem.scales_matrix(w.scales).astype(jnp.float32)

    def matmul_fp8(*refs: Any) -> None:  # the kernel's name in traces
        _program(call, *refs)

    launch = plgpu.kernel(
        matmul_fp8,
        out_type=jax.ShapeDtypeStruct((call.splits, padded, columns), parts_dtype),
        grid=(call.programs,),
        grid_names=("program",),
        num_threads=call.groups + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((call.stages, call.block_rows, _DEPTH), FP8, transforms=_TRANSFORMS),
            plgpu.SMEM((call.stages, call.groups, _COLUMNS, _DEPTH), FP8, transforms=_TRANSFORMS),
            plgpu.SMEM((call.stages, call.scales_width), jnp.float32),
            plgpu.Barrier(num_arrivals=call.groups + 2, num_barriers=call.stages),
            plgpu.Barrier(num_arrivals=call.groups, num_barriers=call.stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    parts = launch(values, weights, row_scales, scales)
    out = parts[0] if call.splits == 1 else jnp.sum(parts, axis=0).astype(out_dtype)
    return out[:rows].reshape(*x.shape[: x.ndim - len(problem.depth)], *problem.columns)


@dataclass(frozen=True, slots=True)
class _Call:
    """The static side of a launch: a tile of the result and one share of its sums are an item of work.

    Attributes:
        problem: The product.
        groups: Warpgroups that multiply, each `_COLUMNS` of a tile.
        block_rows: Rows of a tile.
        row_tiles: Tiles along the rows.
        column_tiles: Tiles along the columns.
        steps: Steps of all terms.
        each: Steps of a share; the last one may have fewer.
    """

    problem: Problem
    groups: int
    block_rows: int
    row_tiles: int
    column_tiles: int
    steps: int
    each: int

    @classmethod
    def of(cls, problem: Problem, rows: int, config: MosaicConfig) -> "_Call":
        """For rows that are padded to whole tiles."""
        _, depth, columns = problem.sizes
        block_rows, steps = min(rows, _MOST_ROWS), depth // _DEPTH
        tiles = rows // block_rows, columns // (config.groups * _COLUMNS)
        return cls(problem, config.groups, block_rows, *tiles, steps, -(-steps // config.splits))

    @property
    def splits(self) -> int:
        """Shares of each sum; each has at least one step."""
        return -(-self.steps // self.each)

    @property
    def tile(self) -> int:
        """Columns of a tile."""
        return self.groups * _COLUMNS

    @property
    def items(self) -> int:
        """Items of work."""
        return self.row_tiles * self.column_tiles * self.splits

    @property
    def programs(self) -> int:
        """One for each processor."""
        return min(self.items, processors())

    @property
    def stages(self) -> int:
        """Steps of tiles on their way at once."""
        stage = _DEPTH * (self.tile + self.block_rows) + 4 * self.scales_width
        return min(_MOST_STAGES, _SHARED_BYTES // stage)

    @property
    def scales_width(self) -> int:
        """Scales of rows that are copied at once: for a tile's rows, and whole `_COPIED_BYTES`."""
        unit = _COPIED_BYTES // 4
        return -(-self.block_rows // unit) * unit


def _program(
    call: _Call,
    x_ref: Any,
    weights_ref: Any,
    row_scales_ref: Any,
    scales_ref: Any,
    out_ref: Any,
    x_ring: Any,
    weights_ring: Any,
    row_scales_ring: Any,
    filled: Any,
    emptied: Any,
) -> None:
    """A program: every so many items of work."""
    program, group = lax.axis_index("program"), lax.axis_index("warpgroup")
    count = lax.div(call.items - program + call.programs - 1, call.programs)
    problem = call.problem

    def place(j: Array) -> tuple[Any, Array, Array, Array, Array]:
        """Slice of rows, column tile, share, and its steps from the first on up to the last."""
        item = program + j * call.programs
        row, rest = lax.rem(item, call.row_tiles), lax.div(item, call.row_tiles)
        column, share = lax.rem(rest, call.column_tiles), lax.div(rest, call.column_tiles)
        first = share * call.each
        rows = pl.ds(row * call.block_rows, call.block_rows)
        return rows, column, share, first, jnp.minimum(first + call.each, call.steps)

    @pl.when(group == call.groups)
    def _copy() -> None:
        plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")

        def item(j: Array, n: Array) -> Array:
            rows, column, _, first, last = place(j)

            def step(i: Array, n: Array) -> Array:
                slot, terms = lax.rem(n, call.stages), pl.ds(i * _DEPTH, _DEPTH)

                @pl.when(n >= call.stages)
                def _wait() -> None:
                    plgpu.barrier_wait(emptied.at[slot])

                def copy(source: Any, ring: Any) -> None:
                    plgpu.copy_gmem_to_smem(source, ring, filled.at[slot])

                copy(x_ref.at[rows, terms], x_ring.at[slot])
                for part in range(call.groups):
                    columns = pl.ds(column * call.tile + part * _COLUMNS, _COLUMNS)
                    copy(weights_ref.at[columns, terms], weights_ring.at[slot, part])
                copy(row_scales_ref.at[i, pl.ds(rows.start, call.scales_width)], row_scales_ring.at[slot])
                return n + 1

            return lax.fori_loop(first, last, step, n)

        lax.fori_loop(0, count, item, jnp.int32(0))

    @pl.when(group < call.groups)
    def _multiply() -> None:
        plgpu.set_max_registers(_REGISTERS[call.groups], action="increase")
        shape = _COLUMNS, call.block_rows

        def item(j: Array, n: Array) -> Array:
            rows, column, share, first, last = place(j)
            start = column * call.tile + group * _COLUMNS
            cell = cell_of(start, problem.columns, problem.columns_block)

            def scale_of(i: Array) -> Array:
                term = jnp.minimum(i, last - 1) * _DEPTH
                return scales_ref[cell_of(term, problem.depth, problem.depth_block), cell]

            def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
                n, sums, scale, *scales = carry
                slot = lax.rem(n, call.stages)
                plgpu.barrier_wait(filled.at[slot])

                def multiply(products_ref: Any) -> Array:
                    plgpu.wgmma(products_ref, weights_ring.at[slot, group], _transposed(x_ring.at[slot]))
                    return products_ref[...]

                products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
                scales_of_rows = row_scales_ring.at[slot, pl.ds(0, call.block_rows)]
                row_scales = _load(scales_of_rows, plgpu.Layout.WGMMA.reduce(0))
                plgpu.barrier_arrive(emptied.at[slot])
                sums += products * lax.broadcast_in_dim(scale * row_scales, shape, (1,))
                return n + 1, sums, *scales, scale_of(i + _SCALES_AHEAD)

            sums = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
            scales = (scale_of(first + i) for i in range(_SCALES_AHEAD))
            n, sums, *_ = lax.fori_loop(first, last, step, (n, sums, *scales))
            store_transposed(sums, out_ref.at[share, rows, pl.ds(start, _COLUMNS)])
            return n

        lax.fori_loop(0, count, item, jnp.int32(0))


def store_transposed(sums: Array, out_ref: Any) -> None:
    """Writes sums [64, rows] of `Layout.WGMMA` to memory, [rows, 64] of an array with more columns."""
    rows, stride, dtype = sums.shape[1], out_ref.ref.shape[-1], jnp.dtype(out_ref.dtype)

    def write(_: Any, out: Any, array: Any) -> None:
        i8, i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (8, 32, 64))
        c, size = functools.partial(utils.c, ty=i32), dtype.itemsize
        # A thread of a warp has, of each 16 rows of sums, two that are eight apart, and of each eight columns
        # two neighbouring ones.
        thread = arith.remui(utils.thread_idx(), c(utils.WARPGROUP_SIZE))
        warp, lane = arith.shrui(thread, c(5)), arith.andi(thread, c(31))
        column = arith.addi(arith.muli(warp, c(16)), arith.shrui(lane, c(2)))
        row = arith.muli(arith.andi(lane, c(3)), c(2))
        start = arith.extui(i64, arith.addi(arith.muli(row, c(stride)), column))
        place = utils.getelementptr(utils.memref_ptr(out), [arith.muli(start, utils.c(size, i64))], i8)
        for (eight, half), pair in np.ndenumerate(array.registers.reshape(rows // 8, 2)):
            for i in range(2):
                value = vector.extract(pair, dynamic_position=[], static_position=[i])
                if dtype != jnp.float32:
                    value = arith.truncf(utils.dtype_to_ir_type(dtype), value)
                at = (8 * eight + i) * stride + 8 * half
                llvm.store(value, utils.getelementptr(place, [at * size], i8), alignment=size)

    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))(write)(out_ref, sums)


def _load(ref: Any, layout: Any) -> Array:
    """An array from shared memory; before JAX 0.11 an index must be given."""
    index: tuple[Any, ...] = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout)


def _transposed(ref: Any) -> Any:
    """A view of a matrix in shared memory; JAX 0.11 gave references a method for it."""
    transpose = getattr(ref, "transpose", None)
    return plgpu.transpose_ref(ref, (1, 0)) if transpose is None else transpose((1, 0))
