"""Tiles of weights in Triton kernels: as they are stored, to the type of the rows that they multiply.

Scales of FP8 multiply the products of the terms that they hold for, in float32; scales of MXFP4 multiply the
weights, exactly. A byte of MXFP4 holds two neighbouring terms, so a step has two tiles there, of even terms
and of odd ones.

Tiles are made to be the second operand of a product, which tensor cores read from shared memory. A first one
would stay in registers, where compilers before CUDA 13.3 can overwrite it while a product still reads.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from pallas_kernels.dispatch import compute_capability
from pallas_kernels.mxfp4 import BLOCK, BLOCK_BYTES, Mxfp4
from pallas_kernels.quantized import Quantized
from pallas_kernels.weights import Narrow

# Ada's, the first that has FP8.
_FP8_CAPABILITY = (8, 9)


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
class Tiles:
    """Some columns of a matrix of weights in memory.

    Attributes:
        refs: Of the values, and of the scales if there are any.
        stored: How the weights are stored: "plain", "fp8" or "mxfp4".
        terms: How many terms the products sum over.
        place: Gives the index of a value, by its term and its column, and of FP8 the index of a scale, by the
            numbers of its cells. Of MXFP4, whose blocks come last, it gives the index before the block, by
            the column alone.
        term_cell: Of FP8, the number of the cell of a term.
        column_cell: Likewise of a column.
    """

    refs: tuple[Any, ...]
    stored: str
    terms: int
    place: Callable[..., tuple[Any, ...]]
    term_cell: Callable[[Any], Any] = int
    column_cell: Callable[[Any], Any] = int

    def of_step(
        self, i: Any, depth: int, columns: Lanes, dtype: jnp.dtype
    ) -> Iterator[tuple[Lanes, Array, Array | None]]:
        """The weights of the terms of one step.

        Args:
            i: Number of the step.
            depth: Terms of a step.
            columns: The columns.
            dtype: Of the tiles.

        Yields:
            Terms; their weights [terms, columns], zero outside; and what multiplies the products of each
            column, or None.
        """
        if self.stored == "mxfp4":
            yield from self._of_mxfp4(i, depth, columns, dtype)
            return
        terms = Lanes.of(i, depth, self.terms)
        index = self.place(terms.lane[:, None], columns.lane[None, :])
        tile = load(self.refs[0], index, both(terms, columns))
        scales = None
        if self.stored == "fp8":
            cells = self.place(self.term_cell(i * depth), self.column_cell(columns.lane))
            scales = load(self.refs[1], cells, columns.inside).astype(jnp.float32)
        yield terms, tile.astype(dtype), scales

    def _of_mxfp4(
        self, i: Any, depth: int, columns: Lanes, dtype: jnp.dtype
    ) -> Iterator[tuple[Lanes, Array, Array | None]]:
        values, powers = self.refs
        count = depth // BLOCK
        blocks = Lanes.of(i, count, self.terms // BLOCK)
        mask = both(columns, blocks)
        column, block = columns.lane[:, None], blocks.lane[None, :]
        # Powers of two: their bytes are the exponents of bfloat16.
        bits = load(powers, (*self.place(column), block), mask).astype(jnp.uint16) << 7
        scale = jax.lax.bitcast_convert_type(bits, jnp.bfloat16)[:, :, None]
        byte = jnp.arange(BLOCK_BYTES, dtype=jnp.int32)[None, None, :]
        shape = columns.lane.size, count, BLOCK_BYTES
        wide_mask = None if mask is None else jnp.broadcast_to(mask[:, :, None], shape)
        index = *self.place(column[:, :, None]), block[:, :, None], byte
        pairs = load(values, index, wide_mask).astype(jnp.uint16)
        lanes = Lanes.of(i, depth // 2, self.terms // 2)
        for half, codes in enumerate((pairs & 15, pairs >> 4)):
            tile = (_values(codes) * scale).reshape(columns.lane.size, depth // 2).astype(dtype)
            yield Lanes(2 * lanes.lane + half, lanes.inside), tile.T, None


def stored_of(w: Array | Narrow) -> str:
    """How weights are stored: "plain", "fp8" or "mxfp4"."""
    return "fp8" if isinstance(w, Quantized) else "mxfp4" if isinstance(w, Mxfp4) else "plain"


def parts_of(w: Array | Narrow) -> tuple[Array, ...]:
    """What a kernel is given of weights, as it becomes `Tiles.refs`."""
    return (w.values, w.scales) if isinstance(w, Narrow) else (w,)


def unsupported(w: Array | Narrow, term_block: int, terms: int, depth: int) -> str | None:
    """Why kernels cannot read weights.

    Args:
        w: The weights.
        term_block: Of FP8, how many terms from any multiple of it on have the same scales.
        terms: How many there are.
        depth: Terms of a step.
    """
    if not isinstance(w, Quantized):
        return f"steps of {depth} terms cut blocks" if isinstance(w, Mxfp4) and depth % BLOCK else None
    capability = compute_capability()
    if capability is not None and capability < _FP8_CAPABILITY:
        return f"the GPU has no FP8: compute capability {'.'.join(map(str, capability))} is below 8.9"
    if term_block < terms and term_block % depth:
        return f"scales change after {term_block} terms, no multiple of {depth}"
    return None


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
    return plgpu.load(ref.at[index], mask=mask, other=zero)


def _values(codes: Array) -> Array:
    """What codes of e2m1 stand for, in bfloat16."""
    magnitude = codes & 7
    half = jnp.uint16(0x3F00)
    bits = jnp.where(magnitude > 1, half + (magnitude << 6), half * magnitude)
    return jax.lax.bitcast_convert_type(bits | (codes & 8) << 12, jnp.bfloat16)


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
