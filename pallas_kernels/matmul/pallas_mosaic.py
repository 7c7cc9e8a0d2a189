"""Products of few rows with FP8 weights on Pallas's Mosaic GPU backend, for Hopper.

A product is computed transposed, out[N, M] = W[N, K] · x[M, K]^T, because tensor cores take at least 64 rows
of their first operand: weights always fill them. A processor's program takes one share of the sums after
another. One of its warpgroups copies weights and rows into a ring of buffers in shared memory; the others
each widen 64 columns of the weights, times their scale, into one of two buffers of their own, while tensor
cores still multiply the other one. Both operands come from shared memory: with one in registers, compilers
before CUDA 13.3 can overwrite it while a product still reads.

Of quantised rows tensor cores multiply both operands as they are. The sums of a step's terms, which share a
scale, are then multiplied by the scales of their row and their column, and added in registers.

Shapes: M rows, K terms, N columns.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import compute_capability, device_kind, processors
from pallas_kernels.matmul.config import MosaicConfig, config_for
from pallas_kernels.matmul.mosaic_tiles import (
    COLUMNS,
    FP8_TERMS_TRANSFORMS,
    FP8_TRANSFORMS,
    WIDE_TRANSFORMS,
    store_transposed,
    widen,
)
from pallas_kernels.matmul.problem import Problem, problem_of
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.quantized import Quantized
from pallas_kernels.weight_tiles import cell_of, row_group_of, with_terms_last
from pallas_kernels.weights import Narrow

#: Compute capability of the only GPUs that the kernel runs on.
HOPPER = (9, 0)
_DEPTH = 128  # terms of a step
# Registers of a thread, by the number of warpgroups that widen and multiply; the copying one takes few.
_REGISTERS = {2: 240, 3: 160}
_COPYING_REGISTERS = 24
_MOST_ROWS = 128  # of a tile: more do not fit into registers
_SHARED_BYTES = 226 << 10
_MOST_STAGES = 8
_COPIED_BYTES = 128  # a copy to shared memory has a multiple
_SCALES_AHEAD = 2  # steps
_FEWEST_STEPS = 2  # of a share
# Parts of sums, relative to weights: fitted to Qwen3-8B's products of 64 and 128 rows on an H100.
_COST_OF_PARTS = 4


def unsupported(x: Array, w: Array | Narrow, spec: str) -> str | None:
    """Why the kernel cannot do a call."""
    if (capability := compute_capability()) is not None and capability != HOPPER:
        return f"it is for compute capability 9.0, not {'.'.join(map(str, capability))}"
    problem = problem_of(spec, x, w)
    if isinstance(problem, str):
        return problem
    group = row_group_of(w)
    if group is None and (problem.stored != "fp8" or x.dtype != jnp.bfloat16):
        return f"it is for bfloat16 and weights in FP8, not for {x.dtype} and {problem.stored} weights"
    if group not in (None, _DEPTH):
        return f"{group or 'all'} terms of a row share a scale, not {_DEPTH}"
    _, depth, columns = problem.sizes
    for size, run, unit, what in (
        (depth, problem.depth_run, _DEPTH, "terms"),
        (columns, problem.columns_run, COLUMNS, "columns"),
    ):
        if run % unit:
            return f"scales change after {run} {what}, no multiple of {unit}"
        if size % unit:
            return f"{size} {what}, no multiple of {unit}"
    if not _groups_of(columns):
        return f"{columns} columns, no multiple of {2 * COLUMNS} or {3 * COLUMNS}"
    return None


def _groups_of(columns: int) -> list[int]:
    """Numbers of warpgroups whose tiles divide the columns."""
    return [groups for groups in _REGISTERS if columns % (groups * COLUMNS) == 0]


def default_config(rows: int, depth: int, columns: int) -> MosaicConfig:
    """The configuration that costs least: processors without work, and parts of sums in memory, cost time."""
    row_tiles = -(-rows // _MOST_ROWS)

    def cost(config: MosaicConfig) -> float:
        items = row_tiles * (columns // (config.groups * COLUMNS)) * config.splits
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
    matrix, scales = x.reshape(rows, depth), problem.scales_matrix(w.scales).astype(jnp.float32)
    if call.quantised:
        length = padded + call.scales_width - call.block_rows
        values, row_scales = quantize_rows(matrix, _DEPTH, length=length)
        operands = [values, with_terms_last(w.values.reshape(depth, columns), 0), row_scales]
    else:
        operands = [jnp.pad(matrix, ((0, padded - rows), (0, 0))), w.values.reshape(depth, columns)]

    def matmul_fp8(*refs: Any) -> None:  # the kernel's name in traces
        *given, scales_ref, out_ref = refs[: len(operands) + 2]
        *rings, filled, emptied = refs[len(operands) + 2 :]
        _program(call, given, scales_ref, out_ref, rings, filled, emptied)

    launch = plgpu.kernel(
        matmul_fp8,
        out_type=jax.ShapeDtypeStruct((call.splits, padded, columns), parts_dtype),
        grid=(call.programs,),
        grid_names=("program",),
        num_threads=call.groups + 1,
        thread_name="warpgroup",
        scratch_types=[
            *call.rings(w.values.dtype),
            plgpu.Barrier(num_arrivals=len(operands) - 1 + call.groups, num_barriers=call.stages),
            plgpu.Barrier(num_arrivals=call.groups, num_barriers=call.stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    parts = launch(*operands, scales)
    out = parts[0] if call.splits == 1 else jnp.sum(parts, axis=0).astype(out_dtype)
    return out[:rows].reshape(*x.shape[: x.ndim - len(problem.depth)], *problem.columns)


@dataclass(frozen=True, slots=True)
class _Call:
    """The static side of a launch: a tile of the result and one share of its sums are an item of work.

    Attributes:
        problem: The product.
        groups: Warpgroups that widen and multiply, each so many columns of a tile.
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
        tiles = rows // block_rows, columns // (config.groups * COLUMNS)
        return cls(problem, config.groups, block_rows, *tiles, steps, -(-steps // config.splits))

    @property
    def splits(self) -> int:
        """Shares of each sum; each has at least one step."""
        return -(-self.steps // self.each)

    @property
    def tile(self) -> int:
        """Columns of a tile."""
        return self.groups * COLUMNS

    @property
    def items(self) -> int:
        """Items of work."""
        return self.row_tiles * self.column_tiles * self.splits

    @property
    def programs(self) -> int:
        """One for each processor."""
        return min(self.items, processors())

    @property
    def quantised(self) -> bool:
        """Whether rows are quantised."""
        return self.problem.stored == "fp8_rows"

    @property
    def stages(self) -> int:
        """Steps of tiles on their way at once."""
        if self.quantised:
            left, row = _SHARED_BYTES - 4 * _MOST_STAGES * self.scales_width, _DEPTH
        else:
            left, row = _SHARED_BYTES - 4 * _DEPTH * self.tile, 2 * _DEPTH
        return min(_MOST_STAGES, left // (_DEPTH * self.tile + row * self.block_rows))

    @property
    def scales_width(self) -> int:
        """Scales of quantised rows that are copied at once: for a tile's rows, and whole `_COPIED_BYTES`."""
        unit = _COPIED_BYTES // 4
        return -(-self.block_rows // unit) * unit

    def rings(self, fp8: Any) -> list[Any]:
        """Buffers of rows, of weights, and of quantised rows' scales or else of widened weights."""
        rows = self.stages, self.block_rows, _DEPTH
        if self.quantised:
            weights = self.stages, self.groups, COLUMNS, _DEPTH
            return [
                plgpu.SMEM(rows, fp8, transforms=FP8_TERMS_TRANSFORMS),
                plgpu.SMEM(weights, fp8, transforms=FP8_TERMS_TRANSFORMS),
                plgpu.SMEM((self.stages, self.scales_width), jnp.float32),
            ]
        weights, widened = (self.stages, self.groups, _DEPTH, COLUMNS), (self.groups, 2, _DEPTH, COLUMNS)
        return [
            plgpu.SMEM(rows, jnp.bfloat16, transforms=WIDE_TRANSFORMS),
            plgpu.SMEM(weights, fp8, transforms=FP8_TRANSFORMS),
            plgpu.SMEM(widened, jnp.bfloat16, transforms=WIDE_TRANSFORMS),
        ]


def _program(
    call: _Call,
    operands: Sequence[Any],
    scales_ref: Any,
    out_ref: Any,
    rings: Sequence[Any],
    filled: Any,
    emptied: Any,
) -> None:
    """A program: every so many items of work. The operands are rows, weights, and the rows' scales if any."""
    x_ref, values_ref, *row_scales = operands
    x_ring, values_ring, last_ring = rings
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
                    columns = pl.ds(column * call.tile + part * COLUMNS, COLUMNS)
                    tile = (columns, terms) if call.quantised else (terms, columns)
                    copy(values_ref.at[tile], values_ring.at[slot, part])
                for row_scales_ref in row_scales:
                    scales = pl.ds(rows.start, call.scales_width)
                    copy(row_scales_ref.at[i, scales], last_ring.at[slot])
                return n + 1

            return lax.fori_loop(first, last, step, n)

        lax.fori_loop(0, count, item, jnp.int32(0))

    @pl.when(group < call.groups)
    def _multiply() -> None:
        plgpu.set_max_registers(_REGISTERS[call.groups], action="increase")
        consumer = _Consumer(call, group, x_ring, values_ring, last_ring, filled, emptied)
        sums_of_steps = consumer.of_quantised_rows if call.quantised else consumer.of_widened_weights

        def item(j: Array, n: Array) -> Array:
            rows, column, share, first, last = place(j)
            start = column * call.tile + group * COLUMNS
            cell = cell_of(start, problem.columns, problem.columns_block)

            def scale_of(i: Array) -> Array:
                term = jnp.minimum(i, last - 1) * _DEPTH
                return scales_ref[cell_of(term, problem.depth, problem.depth_block), cell]

            n, sums = sums_of_steps(n, first, last, scale_of)
            store_transposed(sums, out_ref.at[share, rows, pl.ds(start, COLUMNS)])
            return n

        lax.fori_loop(0, count, item, jnp.int32(0))


@dataclass(frozen=True, slots=True)
class _Consumer:
    """A warpgroup that multiplies. Its methods give the sums of an item's steps.

    They take the number of the program's steps before the item, the item's first step of all terms, the step
    after its last one, and a function that gives the weights' scale of a step. They return the number of
    steps until after the item, and the sums.

    Attributes:
        call: The launch.
        group: The number of the warpgroup.
        x_ring: Buffers of rows.
        values_ring: Buffers of weights.
        last_ring: Buffers of rows' scales or of widened weights, see `_Call.rings`.
        filled: Barriers of the rings' slots.
        emptied: Likewise.
    """

    call: _Call
    group: Array
    x_ring: Any
    values_ring: Any
    last_ring: Any
    filled: Any
    emptied: Any

    def of_widened_weights(
        self, n: Array, first: Array, last: Array, scale_of: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        """By weights that are widened, times their scale, while the previous step's are multiplied."""

        def widened(n: Array) -> Any:
            return self.last_ring.at[self.group, lax.rem(n, 2)]

        def widen_next(n: Array, scale: Array) -> None:
            slot = lax.rem(n, self.call.stages)
            plgpu.barrier_wait(self.filled.at[slot])
            widen(self.values_ring.at[slot, self.group], scale, widened(n))

        def step(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            n, sums, *scales = carry
            slot = lax.rem(n, self.call.stages)
            scales = [*scales[1:], scale_of(i + _SCALES_AHEAD)]

            def multiply(sums_ref: Any) -> None:
                plgpu.wgmma(sums_ref, _transposed(widened(n)), _transposed(self.x_ring.at[slot]))

                @pl.when(i + 1 < last)
                def _meanwhile() -> None:
                    widen_next(n + 1, scales[0])

            sums = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sums))
            plgpu.barrier_arrive(self.emptied.at[slot])
            plgpu.commit_smem()
            return n + 1, sums, *scales

        carry = self._begin(n, first, scale_of)
        widen_next(n, carry[2])
        plgpu.commit_smem()
        n, sums, *_ = lax.fori_loop(first, last, step, carry)
        return n, sums

    def of_quantised_rows(
        self, n: Array, first: Array, last: Array, scale_of: Callable[[Array], Array]
    ) -> tuple[Array, Array]:
        """By both operands in FP8, each step's sums times the scales of their row and their column."""
        shape = COLUMNS, self.call.block_rows

        def step(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            n, sums, scale, *scales = carry
            slot = lax.rem(n, self.call.stages)
            plgpu.barrier_wait(self.filled.at[slot])

            def multiply(sums_ref: Any) -> Array:
                weights = self.values_ring.at[slot, self.group]
                plgpu.wgmma(sums_ref, weights, _transposed(self.x_ring.at[slot]))
                return sums_ref[...]

            products = pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
            rows = self.last_ring.at[slot, pl.ds(0, self.call.block_rows)]
            row_scales = _load(rows, plgpu.Layout.WGMMA.reduce(0))
            plgpu.barrier_arrive(self.emptied.at[slot])
            sums += products * lax.broadcast_in_dim(scale * row_scales, shape, (1,))
            return n + 1, sums, *scales, scale_of(i + _SCALES_AHEAD)

        n, sums, *_ = lax.fori_loop(first, last, step, self._begin(n, first, scale_of))
        return n, sums

    def _begin(self, n: Array, first: Array, scale_of: Callable[[Array], Array]) -> tuple[Array, ...]:
        """What is carried into an item's first step: the number of steps, zero sums, the next scales."""
        zeros = jnp.zeros((COLUMNS, self.call.block_rows), jnp.float32)
        scales = (scale_of(first + i) for i in range(_SCALES_AHEAD))
        return n, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), *scales


def _load(ref: Any, layout: Any) -> Array:
    """An array from shared memory; before JAX 0.11 an index must be given."""
    index: tuple[Any, ...] = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout)


def _transposed(ref: Any) -> Any:
    """A view of a matrix in shared memory; JAX 0.11 gave references a method for it."""
    transpose = getattr(ref, "transpose", None)
    return plgpu.transpose_ref(ref, (1, 0)) if transpose is None else transpose((1, 0))
