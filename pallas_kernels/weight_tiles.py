"""Products of blocks of rows with tiles of weights in Triton kernels, which read weights as they are stored.

Narrow weights are read in words (`weight_words`). Where tensor cores take weights from registers, a word's
parts are in tiles apart: four tiles of FP8 have other columns, and their products are put side by side at the
end; four tiles of MXFP4 have other terms, one of each word, and their products add up. Elsewhere all parts of
a word are put side by side in one tile.

Scales of FP8 multiply the products of the terms that they hold for, in float32; scales of MXFP4 multiply the
weights, exactly. Scales of a step are loaded a step ahead, as the compiler does not prefetch so few bytes.
`rows_for` gives rows the type and the order that let weights be widened with the fewest instructions.
Where rows are in FP8 too ("fp8_rows"), tensor cores multiply both as they are, and both scales follow; the
terms are then the last axis of the weights, as such products need neighbouring terms.

Tiles are made to be the second operand of a product, which tensor cores read from shared memory. A first one
would stay in registers, where compilers before CUDA 13.3 can overwrite it while a product still reads.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, BFloat16, Float16, Float32

from pallas_kernels.dispatch import fp8_problem
from pallas_kernels.mxfp4 import BLOCK, Mxfp4
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.quantized import Quantized, bits_of, of_bits
from pallas_kernels.weight_words import (
    COLUMNS,
    TERMS,
    fp8_columns,
    mxfp4_factor,
    mxfp4_terms,
    side_by_side,
    words_of,
)
from pallas_kernels.weights import Narrow

# From so many rows on Hopper's tensor cores read weights from shared memory.
_SHARED_ROWS = 64
#: Terms that a tensor core's product has at least.
LEAST_DEPTH = 16


class Lanes(NamedTuple):
    """Indices along an axis, and which of them lie inside of it where not all do."""

    lane: Array
    inside: Array | None

    @classmethod
    def of(cls, tile: Any, block: int, size: int) -> "Lanes":
        """Those of a tile of an axis of so many elements."""
        lane = tile * block + jnp.arange(block, dtype=jnp.int32)
        return cls(lane, None if size % block == 0 else lane < size)


@dataclass(frozen=True, slots=True)
class Steps:
    """The terms of a product's sums, in steps.

    Attributes:
        stored: How the weights are stored, see `stored_of`.
        terms: How many terms there are.
        depth: Terms of a step.
        rows: Rows of a block.
        row_group: Terms of a row in FP8 that share a scale; 0 is all.
    """

    stored: str
    terms: int
    depth: int
    rows: int
    row_group: int = 0

    @classmethod
    def of(
        cls, stored: str, terms: int, depth: int, rows: int, run: int = 0, row_group: int | None = None
    ) -> "Steps":
        """Steps of about `depth` terms. `run` terms of the weights have the same scales; 0 is all."""
        if stored == "mxfp4":  # with terms enough for each tile: two blocks
            return cls(stored, terms, max(depth, LEAST_DEPTH * TERMS), rows)
        run = math.gcd(run, row_group or 0)
        return cls(stored, terms, min(depth, (run & -run) or depth), rows, row_group or 0)

    @property
    def count(self) -> int:
        """Steps of all terms."""
        return pl.cdiv(self.terms, self.depth)

    @property
    def apart(self) -> bool:
        """Whether each part of a word is a tile of its own."""
        return self.stored in ("fp8", "mxfp4") and self.rows < _SHARED_ROWS

    def rows_of(self, ref: Any, row: Lanes, i: Any) -> list[Array]:
        """The terms of step i of some rows, one matrix for each tile of other terms; see `Tiles.add`.

        Of rows in FP8 the values, and the scales as a column.
        """
        ref, scales_ref = ref if isinstance(ref, tuple) else (ref, None)
        count, run = (1, self.depth)
        if self.apart and self.stored == "mxfp4":
            count, run = TERMS, BLOCK // TERMS
        own = jnp.arange(self.depth // count, dtype=jnp.int32)
        if count > 1:  # a run of each block, see `_in_order_of_parts`
            own += (BLOCK - run) * jax.lax.div(own, run)
        first = i * self.depth + own
        # Whole blocks lie inside or outside: what holds for the first part holds for all.
        inside = both(row, Lanes(first, None if self.terms % self.depth == 0 else first < self.terms))
        terms = (first + run * part for part in range(count))
        found = [load(ref, (row.lane[:, None], term[None, :]), inside) for term in terms]
        if self.row_group:
            found.append(load(scales_ref, (i * self.depth // self.row_group, row.lane), row.inside)[:, None])
        return found


@dataclass(frozen=True, slots=True)
class Tiles:
    """Some columns of a matrix of weights in memory.

    Attributes:
        refs: Of the values, in words if they are narrow, and of the scales if there are any. Where rows are
            in FP8 too, the values have the terms as their last axis.
        steps: The terms.
        columns: Columns of the matrix.
        block: Columns of a tile.
        at: Number of the tile.
        place: Gives the index of a value by its term and its column. Of FP8 the column is that of a word, of
            MXFP4 the term; and of FP8 it gives the index of a scale by the numbers of its cells.
        term_cell: Of FP8, the number of the cell of a term.
        column_cell: Likewise of a column.
        columns_run: Of FP8, so many columns from any multiple of it on have the same scales; 0 is all.
    """

    refs: tuple[Any, ...]
    steps: Steps
    columns: int
    block: int
    at: Any
    place: Callable[[Any, Any], tuple[Any, ...]]
    term_cell: Callable[[Any], Any] = int
    column_cell: Callable[[Any], Any] = int
    columns_run: int = 0

    @property
    def parts(self) -> int:
        """Tiles of other columns."""
        return COLUMNS if self.steps.apart and self.steps.stored == "fp8" else 1

    def scales(self, i: Any) -> tuple[Array, ...]:
        """The scales of a step: of FP8 one for all tiles of other columns, or one for each."""
        if self.steps.stored == "plain":
            return ()
        if self.steps.stored == "mxfp4":
            column = Lanes.of(self.at, self.block, self.columns)
            block = Lanes.of(i, self.steps.depth // BLOCK, self.steps.terms // BLOCK)
            index = self.place(block.lane[None, :], column.lane[:, None])
            return (load(self.refs[1], index, both(column, block)),)

        def of_columns(column: Any, inside: Array | None) -> Array:
            cells = self.term_cell(i * self.steps.depth), self.column_cell(column)
            return load(self.refs[1], self.place(*cells), inside).astype(jnp.float32)

        if self.columns_run % self.block == 0:  # one scale for all
            return (of_columns(self.at * self.block, None),)
        if self.parts == 1:
            return (of_columns(*Lanes.of(self.at, self.block, self.columns))[None, :],)
        word = Lanes.of(self.at, self.block // COLUMNS, self.columns // COLUMNS)
        own = 1 if self.columns_run % COLUMNS == 0 else COLUMNS  # one scale for each word, or four
        return tuple(of_columns(COLUMNS * word.lane + part, word.inside)[None, :] for part in range(own))

    def add(
        self,
        sums: tuple[Array, ...],
        rows: Sequence[Array],
        i: Any,
        scales: tuple[Array, ...],
        precision: Any,
    ) -> tuple[Array, ...]:
        """The sums of each tile of other columns, with those of a step's terms."""
        if self.steps.stored == "mxfp4":
            (out,), (scale_bytes,) = sums, scales
            for x, tile in zip(rows, self._mxfp4(i, scale_bytes, rows[0].dtype), strict=True):
                out += plgpu.dot(x, tile, precision=precision)
            return (out,)
        x, *row_scales = rows
        each = (plgpu.dot(x, tile, precision=precision) for tile in self._columns(i, x.dtype))
        if scales:
            spread = scales * (self.parts // len(scales))
            each = (product * scale for product, scale in zip(each, spread, strict=True))
        for scale in row_scales:
            each = (product * scale for product in each)
        return tuple(own + product for own, product in zip(sums, each, strict=True))

    def _columns(self, i: Any, dtype: jnp.dtype) -> Sequence[Array]:
        """Tiles [terms, columns] of other columns."""
        terms = Lanes.of(i, self.steps.depth, self.steps.terms)
        if self.steps.stored == "fp8_rows":
            column, term = Lanes.of(self.at, self.block, self.columns), terms.lane[None, :]
            others = (part for part in self.place(term, column.lane[:, None]) if part is not term)
            return [load(self.refs[0], (*others, term), both(column, terms)).T]
        width = COLUMNS if self.steps.stored == "fp8" else 1
        column = Lanes.of(self.at, self.block // width, self.columns // width)
        index = self.place(terms.lane[:, None], column.lane[None, :])
        values = load(self.refs[0], index, both(terms, column))
        if width == 1:
            return [values]
        tiles = fp8_columns(values, dtype)
        return tiles if self.steps.apart else [side_by_side(tiles)]

    def _mxfp4(self, i: Any, scales: Array, dtype: jnp.dtype) -> list[Array]:
        """Tiles [terms, columns] of other terms."""
        depth, terms = self.steps.depth // TERMS, self.steps.terms // TERMS
        column, word = Lanes.of(self.at, self.block, self.columns), Lanes.of(i, depth, terms)
        index = self.place(word.lane[None, :], column.lane[:, None])
        tiles = mxfp4_terms(load(self.refs[0], index, both(column, word)), scales, dtype)
        if self.steps.apart:
            return [tile.T for tile in tiles]
        return [_in_order_of_parts(side_by_side(tiles)).T]


def multiply(
    ref: Any, row: Lanes, tiles: Sequence[Tiles], first: Any, last: Any, precision: Any
) -> list[Float32[Array, "rows columns"]]:
    """The products of some rows [R, K] with one tile of each matrix; all are stored in the same way.

    `ref` is that of the rows, or those of what `rows_for` gives.
    Steps `first` to `last`, of which there is at least one, make the sums; the last one is not included.
    """
    steps = tiles[0].steps

    def step(i: Array, carry: Any) -> Any:
        sums, scales = carry
        ahead = [tile.scales(jnp.minimum(i + 1, last - 1)) for tile in tiles]
        rows = steps.rows_of(ref, row, i)
        each = zip(tiles, sums, scales, strict=True)
        return [tile.add(own, rows, i, scale, precision) for tile, own, scale in each], ahead

    zeros = [(jnp.zeros((steps.rows, tile.block // tile.parts), jnp.float32),) * tile.parts for tile in tiles]
    sums, _ = jax.lax.fori_loop(first, last, step, (zeros, [tile.scales(first) for tile in tiles]))
    products = [side_by_side(parts) for parts in sums]
    if steps.stored == "mxfp4":
        return [product * (1 / mxfp4_factor(ref.dtype)) for product in products]
    if isinstance(ref, tuple) and not steps.row_group:
        scale = load(ref[1], (0, row.lane), row.inside)[:, None]
        return [product * scale for product in products]
    return products


def stored_of(w: Array | Narrow) -> str:
    """How weights are stored: "plain", "fp8" or "mxfp4"; "fp8_rows" is FP8 whose rows are quantised too."""
    if isinstance(w, Quantized):
        return "fp8" if w.row_group is None else "fp8_rows"
    return "mxfp4" if isinstance(w, Mxfp4) else "plain"


def rows_for(w: Array | Narrow, x: Array, *, in_float16: bool = False) -> Array | tuple[Array, Array]:
    """Rows [R, K] as a kernel is given them: for MXFP4 in its order, where they are quantised with scales.

    ``in_float16`` is whether rows in bfloat16 become float16, with scales, if that lets a GPU widen FP8 with
    fewer instructions. That takes launches, so it is for kernels that read many weights.
    """
    if isinstance(w, Mxfp4):
        return _in_order_of_parts(x)
    if not isinstance(w, Quantized):
        return x
    if w.row_group is not None:
        return quantize_rows(x, w.row_group)
    return _in_float16(x) if in_float16 and x.dtype == jnp.bfloat16 else x


def _in_float16(x: BFloat16[Array, "R K"]) -> tuple[Float16[Array, "R K"], Float32[Array, "1 R"]]:
    """Rows in float16, and what to multiply each by.

    A row's largest magnitude becomes 2**14 or more, so that all from 2**-31 of it on is exact.
    """
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1, keepdims=True)
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    power = jnp.maximum(jax.lax.bitcast_convert_type(exponent, jnp.float32), 2.0**-100)
    return (wide * (2.0**14 / power)).astype(jnp.float16), power.T * 2.0**-14


def _in_order_of_parts(x: Array) -> Array:
    """The terms 0 4 8 12 ... of each block, then 1 5 9 13 ... and so on.

    The terms i of two words of MXFP4 are widened together, as halves of a register.
    """
    return x.reshape(x.shape[0], -1, BLOCK // TERMS, TERMS).swapaxes(2, 3).reshape(x.shape)


def place_of(w: Array | Narrow, term: Array) -> Array:
    """Where rows that a kernel writes for the next one have a term, so that they need no `rows_for`."""
    if not isinstance(w, Mxfp4):
        return term
    own = jax.lax.rem(term, BLOCK)
    return term - own + jax.lax.rem(own, TERMS) * (BLOCK // TERMS) + jax.lax.div(own, TERMS)


def with_terms_last(values: Array, axis: int) -> Array:
    """Values of FP8 with the terms as the last axis; where they lie so in memory, nothing is moved."""
    return of_bits(jnp.moveaxis(bits_of(values), axis, -1))


def row_group_of(w: Array | Narrow) -> int | None:
    """The `Quantized.row_group` of any weights."""
    return w.row_group if isinstance(w, Quantized) else None


def parts_of(w: Array | Narrow) -> tuple[Array, ...]:
    """Weights as a kernel is given them, and as they become `Tiles.refs`."""
    if isinstance(w, Quantized):
        last = stored_of(w) == "fp8_rows"
        return with_terms_last(w.values, 1) if last else words_of(w.values, COLUMNS), w.scales
    if isinstance(w, Mxfp4):
        return words_of(w.values, TERMS // 2).reshape(*w.scales.shape[:-1], -1), w.scales
    return (w,)


def unsupported(w: Array | Narrow, term_block: int, terms: int, columns: int) -> str | None:
    """Why kernels cannot read weights of so many terms and columns, as they lie in memory.

    `term_block` terms of FP8 from any multiple of it on have the same scales.
    """
    if not isinstance(w, Quantized):
        return None
    if problem := fp8_problem():
        return problem
    # Products of two operands in FP8 have twice as many terms.
    least = LEAST_DEPTH if w.row_group is None else 2 * LEAST_DEPTH
    run = math.gcd(term_block % terms, w.row_group or 0) or terms
    if run < terms and run % least:
        return f"scales change after {run} terms, no multiple of {least}"
    return f"{columns} columns, no multiple of {COLUMNS}" if columns % COLUMNS else None


def both(first: Lanes, second: Lanes) -> Array | None:
    """The mask of a matrix, of those of its axes."""
    if first.inside is None and second.inside is None:
        return None
    mask = jnp.ones((first.lane.size, second.lane.size), bool)
    mask = mask if first.inside is None else mask & first.inside[:, None]
    return mask if second.inside is None else mask & second.inside[None, :]


def load(ref: Any, index: tuple[Any, ...], mask: Array | None) -> Array:
    """Elements, zero outside."""
    zero = None if mask is None else jnp.zeros((), ref.dtype)
    # Arrays, as the interpreter cannot load a single element by plain integers.
    place = tuple(jnp.asarray(part, jnp.int32) for part in index)
    return plgpu.load(ref.at[place], mask=mask, other=zero)


def cell_of(index: Any, sizes: tuple[int, ...], block: tuple[int, ...]) -> Any:
    """The number of the scale of an element, by its number among elements of some axes."""
    cell, stride = 0 * index, 1
    for size in sizes:
        stride *= size
    for size, own in zip(sizes, block, strict=True):
        stride //= size
        if own < size:
            place = jax.lax.rem(jax.lax.div(index, stride), size)
            cell = cell * pl.cdiv(size, own) + jax.lax.div(place, own)
    return cell
