"""Stores of committed tokens: pages in one pool per layer, slots with a block table each, and the commit.

A store holds committed tokens only. A forward pass reads stores and never writes them; what it computes for
its block is a stash, and `commit` writes the rows of the accepted path, once. Nothing is ever rolled back.
"""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jetspec_jax.block import Block
from jetspec_jax.config import ModelConfig
from jetspec_jax.models.layers import KV, Attend
from pallas_kernels.paged_write import paged_write
from pallas_kernels.tree_attention import PagedPrefix, tree_attention


class Slots(NamedTuple):
    """Where each slot's committed tokens lie; one block table serves every store of a sequence.

    Attributes:
        block_tables: Pages of each slot in logical order; an entry of at least P is no page.
        lengths: Committed tokens of each slot, S.
    """

    block_tables: Int32[Array, "B T"]
    lengths: Int32[Array, "B"]


#: One layer's pages: keys and values, each ``[P, page, G, E]``.
Store = KV


def empty_stores(config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype) -> tuple[Store, ...]:
    """A store per layer. Layers may differ in geometry, so they are never stacked into one array."""
    shapes = [(num_pages, page_size, layer.num_kv_heads, layer.head_dim) for layer in config.layers]
    return tuple(Store(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for shape in shapes)


def attend_over(
    stores: tuple[Store, ...] | None, slots: Slots | None, block: Block, *, implementation: str | None = None
) -> Attend:
    """Attention of a block over the committed tokens of its slots; over the block alone without stores."""
    mask = block.mask()

    def attend(
        layer: int,
        q: Float[Array, "B N H E"],
        kv: KV,
        *,
        scale: float,
        window: int | None,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B N H E"]:
        prefix = None
        if stores is not None and slots is not None:
            prefix = PagedPrefix(stores[layer].k, stores[layer].v, slots.block_tables, slots.lengths)
        return tree_attention(
            q,
            kv.k,
            kv.v,
            mask,
            prefix,
            scale=scale,
            window=window,
            depths=block.depths,
            sinks=sinks,
            implementation=implementation,
        )

    return attend


def commit(
    stores: tuple[Store, ...],
    stash: tuple[KV, ...],
    slots: Slots,
    count: Int[Array, "B"],
    *,
    path: Int32[Array, "B R"] | None = None,
    implementation: str | None = None,
) -> tuple[Store, ...]:
    """Writes the first ``count[b]`` rows of each slot's path behind its committed tokens, in all layers.

    Example: of nodes 0..3 with the path 0, 2, -1 and a count of 2, rows 0 and 2 follow the committed ones.

    Args:
        stores: One store per layer, all with as many pages of one size.
        stash: For each layer the rows of a block.
        slots: The slots *before* the commit.
        count: Rows to write; 0 leaves a slot as it is. Rows that fall behind a slot's last page are dropped:
            they can only be overshoot of a request that ends with them. It must follow from what the
            forward over these stores gave: where no data ties the write to the last read, XLA copies a store.
        path: Nodes to write, in logical order, which need not be a prefix of the block; what lies behind
            ``count`` may be anything. None is a chain: all rows of the block, as they stand.
        implementation: Of the paged write; None picks the best.
    """
    batch, num_nodes = stash[0].k.shape[:2]
    num_pages, page_size = stores[0].k.shape[:2]
    if path is None:
        path = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32)[None, :], (batch, num_nodes))
    step = jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
    position = slots.lengths[:, None] + step
    page = jnp.take_along_axis(
        slots.block_tables, position // page_size, axis=1, mode="fill", fill_value=num_pages
    )
    # Compared before it is multiplied: a page number that is none may be any, and the product overflow.
    there = (step < count[:, None]) & (page >= 0) & (page < num_pages)
    where = jnp.where(there, page * page_size + position % page_size, -1)
    # One write for all layers: a launch each would take longer than the bytes.
    written = paged_write(
        jax.tree.leaves(stores), jax.tree.leaves(stash), path, where, implementation=implementation
    )
    return jax.tree.unflatten(jax.tree.structure(stores), written)


@dataclass
class PagePool:
    """The free pages of a pool, on the host. Pages are reserved at admission and returned at release."""

    num_pages: int

    def __post_init__(self) -> None:
        """All pages are free at first."""
        self._free = deque(range(self.num_pages))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def reserve(self, count: int) -> list[int] | None:
        """Takes ``count`` pages, or none at all when there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def release(self, pages: list[int]) -> None:
        """Gives pages back."""
        self._free.extend(pages)
