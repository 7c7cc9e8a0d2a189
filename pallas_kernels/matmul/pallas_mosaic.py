"""Products of few rows with FP8 weights on Pallas's Mosaic GPU backend, for Hopper.

A product is computed transposed, out[N, M] = W[N, K] · x[M, K]^T, because tensor cores take at least 64 rows
of their first operand: weights always fill them. A processor's program takes one share of the sums after
another. One of its warpgroups copies weights and rows into a ring of buffers in shared memory; the others
each widen 64 columns of the weights, times their scale, into one of two buffers of their own, while tensor
cores still multiply the other one. Both operands come from shared memory: with one in registers, compilers
before CUDA 13.3 can overwrite it while a product still reads.

Shapes: M rows, K terms, N columns.
"""

import functools
import itertools
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
    FP8_TRANSFORMS,
    WIDE_TRANSFORMS,
    store_transposed,
    widen,
)
from pallas_kernels.matmul.problem import Problem, problem_of
from pallas_kernels.quantized import Quantized
from pallas_kernels.weight_tiles import cell_of
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
    if problem.stored == "fp8_rows":
        return "it does not quantise rows"
    if problem.stored != "fp8" or x.dtype != jnp.bfloat16:
        return f"it is for bfloat16 and weights in FP8, not for {x.dtype} and {problem.stored} weights"
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
    config = config or config_for("pallas_mosaic", device_kind(), "fp8", *problem.sizes)
    call = _Call.of(problem, padded, config or default_config(*problem.sizes))
    parts_dtype = out_dtype if call.splits == 1 else jnp.dtype(jnp.float32)

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
            plgpu.SMEM((call.stages, call.block_rows, _DEPTH), x.dtype, transforms=WIDE_TRANSFORMS),
            plgpu.SMEM(
                (call.stages, call.groups, _DEPTH, COLUMNS), w.values.dtype, transforms=FP8_TRANSFORMS
            ),
            plgpu.SMEM((call.groups, 2, _DEPTH, COLUMNS), x.dtype, transforms=WIDE_TRANSFORMS),
            plgpu.Barrier(num_arrivals=1 + call.groups, num_barriers=call.stages),
            plgpu.Barrier(num_arrivals=call.groups, num_barriers=call.stages),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    own = jnp.pad(x.reshape(rows, depth), ((0, padded - rows), (0, 0)))
    parts = launch(own, w.values.reshape(depth, columns), problem.scales_matrix(w.scales).astype(jnp.float32))
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
    def stages(self) -> int:
        """Steps of tiles on their way at once."""
        left = _SHARED_BYTES - 4 * _DEPTH * self.tile
        return min(_MOST_STAGES, left // (_DEPTH * (self.tile + 2 * self.block_rows)))


def _program(
    call: _Call,
    x_ref: Any,
    values_ref: Any,
    scales_ref: Any,
    out_ref: Any,
    x_ring: Any,
    values_ring: Any,
    wide_ref: Any,
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

                plgpu.copy_gmem_to_smem(x_ref.at[rows, terms], x_ring.at[slot], filled.at[slot])
                for own in range(call.groups):
                    columns = pl.ds(column * call.tile + own * COLUMNS, COLUMNS)
                    plgpu.copy_gmem_to_smem(
                        values_ref.at[terms, columns], values_ring.at[slot, own], filled.at[slot]
                    )
                return n + 1

            return lax.fori_loop(first, last, step, n)

        lax.fori_loop(0, count, item, jnp.int32(0))

    @pl.when(group < call.groups)
    def _multiply() -> None:
        plgpu.set_max_registers(_REGISTERS[call.groups], action="increase")

        def item(j: Array, n: Array) -> Array:
            rows, column, share, first, last = place(j)
            start = column * call.tile + group * COLUMNS
            cell = cell_of(start, problem.columns, problem.columns_block)

            def scale_of(i: Array) -> Array:
                term = jnp.minimum(i, last - 1) * _DEPTH
                return scales_ref[cell_of(term, problem.depth, problem.depth_block), cell]

            def widened(n: Array) -> Any:
                return wide_ref.at[group, lax.rem(n, 2)]

            def widen_next(n: Array, scale: Array) -> None:
                slot = lax.rem(n, call.stages)
                plgpu.barrier_wait(filled.at[slot])
                widen(values_ring.at[slot, group], scale, widened(n))

            def step(i: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
                n, sums, *scales = carry
                slot = lax.rem(n, call.stages)
                scales = [*scales[1:], scale_of(i + _SCALES_AHEAD)]

                def multiply(sums_ref: Any) -> None:
                    plgpu.wgmma(sums_ref, _transposed(widened(n)), _transposed(x_ring.at[slot]))

                    @pl.when(i + 1 < last)
                    def _meanwhile() -> None:
                        widen_next(n + 1, scales[0])

                sums = pl.run_state(multiply)(plgpu.WGMMAAccumulatorRef.init(sums))
                plgpu.barrier_arrive(emptied.at[slot])
                plgpu.commit_smem()
                return n + 1, sums, *scales

            zeros = jnp.zeros((COLUMNS, call.block_rows), jnp.float32)
            scales = [scale_of(first + i) for i in range(_SCALES_AHEAD)]
            widen_next(n, scales[0])
            plgpu.commit_smem()
            carry = n, plgpu.layout_cast(zeros, plgpu.Layout.WGMMA), *scales
            n, sums, *_ = lax.fori_loop(first, last, step, carry)
            store_transposed(sums, out_ref.at[share, rows, pl.ds(start, COLUMNS)])
            return n

        lax.fori_loop(0, count, item, jnp.int32(0))


def _transposed(ref: Any) -> Any:
    """A view of a matrix in shared memory; JAX 0.11 gave references a method for it."""
    transpose = getattr(ref, "transpose", None)
    return plgpu.transpose_ref(ref, (1, 0)) if transpose is None else transpose((1, 0))
