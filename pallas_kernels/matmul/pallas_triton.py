"""Products of few rows on Pallas's Triton backend: weights are read once, as they are stored.

A program has some columns of some rows, and a share of the sums' terms:

    program (r, c, s)  =  rows r of columns c, terms s

Programs of the same columns follow each other, so that those after the first find the weights in the cache.
FP8 is read in words of four columns, each of which becomes a tile of its own.

Shapes: M rows, K terms, N columns.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.dispatch import device_kind
from pallas_kernels.fp8_words import WORD, columns_of, side_by_side, words_of
from pallas_kernels.matmul.config import Config, config_for, default_config
from pallas_kernels.matmul.problem import Problem, problem_of
from pallas_kernels.mxfp4 import BLOCK_BYTES, Mxfp4
from pallas_kernels.quantized import Quantized
from pallas_kernels.weight_tiles import Lanes, Tiles, both, cell_of, load
from pallas_kernels.weights import Narrow

# From so many rows on Hopper's tensor cores read weights from shared memory.
_SHARED_ROWS = 64


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
    block_depth = min(chosen.block_depth, (problem.depth_run & -problem.depth_run) or chosen.block_depth)
    # Tensor cores would round float32 to TF32.
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    call = _Call(problem, chosen, block_depth, precision)
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


def _matrices(problem: Problem, x: Array, w: Array | Narrow) -> tuple[Array, ...]:
    """Rows, weights as they are stored, and their scales, if they have any."""
    rows, depth, columns = problem.sizes
    x = x.reshape(rows, depth)
    if isinstance(w, Mxfp4):
        return x, w.values.reshape(columns, -1, BLOCK_BYTES), w.scales.reshape(columns, -1)
    if isinstance(w, Quantized):
        return x, words_of(w.values.reshape(depth, columns)), problem.scales_matrix(w.scales)
    return x, w.reshape(depth, columns)


@dataclass(frozen=True, slots=True)
class _Call:
    """The static side of a launch."""

    problem: Problem
    config: Config
    block_depth: int
    precision: jax.lax.Precision | None

    @property
    def steps(self) -> int:
        """Steps of all terms."""
        return pl.cdiv(self.problem.sizes[1], self.block_depth)

    @property
    def splits(self) -> int:
        """Programs that share them; each has at least one."""
        return pl.cdiv(self.steps, pl.cdiv(self.steps, self.config.splits))

    @property
    def parts(self) -> int:
        """Tiles that the columns of a program are multiplied in.

        Those of FP8's words are put side by side after the product, where tensor cores take them from
        registers, or before it.
        """
        return WORD if self.problem.stored == "fp8" and self.config.block_rows < _SHARED_ROWS else 1


def _program(call: _Call, x_ref: Any, *refs: Any) -> None:
    """One program: some columns of some rows, of some terms."""
    *weights, out_ref = refs
    (rows, _, columns), config = call.problem.sizes, call.config
    row, place = Lanes.of(pl.program_id(0), config.block_rows, rows), pl.program_id(1)
    column = Lanes.of(place, config.block_columns, columns)

    def rows_of(terms: Lanes) -> Array:
        return load(x_ref, (row.lane[:, None], terms.lane[None, :]), both(row, terms))

    def step(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        tiles = Tiles(tuple(weights), call.problem.stored, call.problem.sizes[1], lambda *index: index)
        (out,) = sums
        for terms, tile, _ in tiles.of_step(i, call.block_depth, column, x_ref.dtype):
            out += plgpu.dot(rows_of(terms), tile, precision=call.precision)
        return (out,)

    def step_of_fp8(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        terms, tiles = _fp8_tiles(call, weights[0], place, i, x_ref.dtype)
        x, scales = rows_of(terms), _scales(call, weights[1], place, i)
        products = (plgpu.dot(x, tile, precision=call.precision) for tile in tiles)
        return tuple(
            out + product * scale for out, product, scale in zip(sums, products, scales, strict=True)
        )

    each = pl.cdiv(call.steps, call.splits)
    first = pl.program_id(2) * each
    last = jnp.minimum(first + each, call.steps)
    zeros = jnp.zeros((config.block_rows, config.block_columns // call.parts), jnp.float32)
    body = step_of_fp8 if call.problem.stored == "fp8" else step
    sums = jax.lax.fori_loop(first, last, body, (zeros,) * call.parts)
    out = sums[0] if call.parts == 1 else side_by_side(sums)
    index = pl.program_id(2), row.lane[:, None], column.lane[None, :]
    plgpu.store(out_ref.at[index], out.astype(out_ref.dtype), mask=both(row, column))


def _fp8_tiles(
    call: _Call, words_ref: Any, place: Array, i: Array, dtype: jnp.dtype
) -> tuple[Lanes, Sequence[Array]]:
    """The terms of a step, and `_Call.parts` tiles of the weights of the columns at a place."""
    _, depth, columns = call.problem.sizes
    terms = Lanes.of(i, call.block_depth, depth)
    word = Lanes.of(place, call.config.block_columns // WORD, columns // WORD)
    words = load(words_ref, (terms.lane[:, None], word.lane[None, :]), both(terms, word))
    tiles = columns_of(words, dtype)
    return terms, tiles if call.parts == WORD else [side_by_side(tiles)]


def _scales(call: _Call, ref: Any, place: Array, i: Array) -> tuple[Array, ...]:
    """What multiplies the products of a step, for each of its tiles."""
    problem, block = call.problem, call.config.block_columns
    columns = problem.sizes[2]
    term_cell = cell_of(i * call.block_depth, problem.depth, problem.depth_block)

    def of_columns(column: Array, inside: Array | None) -> Array:
        cell = cell_of(column, problem.columns, problem.columns_block)
        return load(ref, (term_cell, cell), inside).astype(jnp.float32)

    if problem.columns_run % block == 0:  # one scale for all
        return (of_columns(place * block, None),) * call.parts
    if call.parts == 1:
        column = Lanes.of(place, block, columns)
        return (of_columns(*column)[None, :],)
    word = Lanes.of(place, block // WORD, columns // WORD)
    if problem.columns_run % WORD == 0:  # one for each word
        return (of_columns(WORD * word.lane, word.inside)[None, :],) * WORD
    return tuple(of_columns(WORD * word.lane + part, word.inside)[None, :] for part in range(WORD))
