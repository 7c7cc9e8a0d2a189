"""Products of few rows on Pallas's Triton backend: weights are read once, as they are stored.

A program has some columns of some rows, and a share of the sums' terms:

    program (r, c, s)  =  rows r of columns c, terms s

Programs of the same columns follow each other, so that those after the first find the weights in the cache.
`weight_tiles` reads the weights. Rows that are to be quantised are so before.

Shapes: M rows, K terms, N columns.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import device_kind
from pallas_kernels.matmul.config import Config, config_for, default_config
from pallas_kernels.matmul.problem import Problem, problem_of
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.quantized import Quantized
from pallas_kernels.weight_tiles import (
    Lanes,
    Steps,
    Tiles,
    both,
    cell_of,
    multiply,
    row_group_of,
    rows_for,
    with_terms_last,
)
from pallas_kernels.weight_words import COLUMNS, TERMS, words_of
from pallas_kernels.weights import Narrow


@functools.partial(jax.jit, static_argnames=("spec", "wide", "config", "interpret"))
def matmul(
    x: Float[Array, "*rows"],
    w: Float[Array, "*weights"] | Narrow,
    *,
    spec: str,
    wide: bool,
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "*out"]:
    """See `api.matmul`. `config` overrides the rule's; `interpret` runs without a GPU."""
    problem = problem_of(spec, x, w)
    assert isinstance(problem, Problem), problem
    rows, depth, columns = problem.sizes
    sizes = problem.stored, rows, depth, columns
    chosen: Config = config or config_for("pallas_triton", device_kind(), *sizes) or default_config(*sizes)
    run, row_group = problem.depth_run, row_group_of(w)
    steps = Steps.of(problem.stored, depth, chosen.block_depth, chosen.block_rows, run, row_group)
    # Tensor cores would round float32 to TF32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    call = _Call(problem, chosen, steps, precision)
    out_dtype = jnp.dtype(jnp.float32) if wide else x.dtype
    splits = call.splits
    launch: Any = pl.pallas_call(
        functools.partial(_program, call),
        out_shape=jax.ShapeDtypeStruct((splits, rows, columns), out_dtype if splits == 1 else jnp.float32),
        grid=(pl.cdiv(rows, chosen.block_rows), pl.cdiv(columns, chosen.block_columns), splits),
        compiler_params=plgpu.CompilerParams(num_warps=chosen.num_warps, num_stages=chosen.num_stages),
        interpret=interpret,
        name=f"matmul_{problem.stored}",
    )
    parts = launch(*_matrices(problem, x, w))
    out = parts[0] if splits == 1 else jnp.sum(parts, axis=0).astype(out_dtype)
    return out.reshape(*x.shape[: x.ndim - len(problem.depth)], *problem.columns)


def _matrices(problem: Problem, x: Array, w: Array | Narrow) -> tuple[Any, ...]:
    """Rows, weights as they are read, and their scales, if they have any."""
    rows, depth, columns = problem.sizes
    given = rows_for(w, x.reshape(rows, depth))
    if isinstance(w, Mxfp4):
        return given, words_of(w.values, TERMS // 2).reshape(columns, -1), w.scales.reshape(columns, -1)
    if isinstance(w, Quantized):
        values = w.values.reshape(depth, columns)
        scales = problem.scales_matrix(w.scales)
        read = with_terms_last(values, 0) if problem.stored == "fp8_rows" else words_of(values, COLUMNS)
        return given, read, scales
    return given, w.reshape(depth, columns)


@dataclass(frozen=True, slots=True)
class _Call:
    """The static side of a launch."""

    problem: Problem
    config: Config
    steps: Steps
    precision: jax.lax.Precision | None

    @property
    def splits(self) -> int:
        """Programs that share the steps; each has at least one."""
        count = self.steps.count
        return pl.cdiv(count, pl.cdiv(count, self.config.splits))


def _program(call: _Call, x_ref: Any, *refs: Any) -> None:
    """One program: some columns of some rows, of some terms."""
    *weights, out_ref = refs
    problem, config, steps = call.problem, call.config, call.steps
    rows, _, columns = problem.sizes
    row, place = Lanes.of(pl.program_id(0), config.block_rows, rows), pl.program_id(1)
    column = Lanes.of(place, config.block_columns, columns)
    tiles = Tiles(
        tuple(weights),
        steps,
        columns,
        config.block_columns,
        place,
        (lambda term, column: (column, term)) if problem.stored == "mxfp4" else (lambda *index: index),
        lambda term: cell_of(term, problem.depth, problem.depth_block),
        lambda column: cell_of(column, problem.columns, problem.columns_block),
        problem.columns_run,
    )
    each = pl.cdiv(steps.count, call.splits)
    first = pl.program_id(2) * each
    last = jnp.minimum(first + each, steps.count)
    [out] = multiply(x_ref, row, [tiles], first, last, call.precision)
    index = pl.program_id(2), row.lane[:, None], column.lane[None, :]
    plgpu.store(out_ref.at[index], out.astype(out_ref.dtype), mask=both(row, column))
