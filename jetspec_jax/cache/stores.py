"""Stores of committed tokens: pages in one pool per layer, slots with a block table each, and the commit.

A store holds committed tokens only. A forward pass reads stores and never writes them; what it computes for
its block is a stash, and `commit` writes the rows of the accepted path, once. Nothing is ever rolled back.

A layer with a window looks back no further than that, so its store gives each slot a ring of a few pages.
Page n of the sequence lies in page n % R of the ring, over page n - R, which no later block sees; and what a
commit overwrites, the forward before it has read.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import NamedTuple, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jetspec_jax.cache.block import Block
from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.models.layers import KV, Attend
from pallas_kernels.paged_write import paged_write
from pallas_kernels.tree_attention import PagedPrefix, tree_attention

# One step of the attention kernel's keys: pages of 128 were no faster on an H200, and waste more.
PAGE_SIZE = 64
#: The entry of a block table that is no page; outside of 0..P - 1 any entry is none.
NO_PAGE = -1


class Slots(NamedTuple):
    """Where each slot's committed tokens lie; one block table serves every store that has no rings.

    Attributes:
        block_tables: Pages of each slot in logical order, or `NO_PAGE`.
        lengths: Committed tokens of each slot, S.
        rings: Each slot's ring, in all stores of rings: the slot's own index.
    """

    block_tables: Int32[Array, "B T"]
    lengths: Int32[Array, "B"]
    rings: Int32[Array, "B"]

    @classmethod
    def of(cls, block_tables: Int32[Array, "B T"], lengths: Int32[Array, "B"]) -> "Slots":
        """All the slots there are, in order."""
        return cls(block_tables, lengths, jnp.arange(len(lengths), dtype=jnp.int32))


# Unchecked by the tests' typing hook: JAX rebuilds pytrees around leaves of any kind.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Store:
    """One layer's pages.

    Attributes:
        k: Keys.
        v: Values.
        ring: R, pages of each slot's ring; None where block tables name the pages.
    """

    k: Float[Array, "P page G E"]
    v: Float[Array, "P page G E"]
    ring: int | None = field(default=None, metadata={"static": True})


def ring_pages(window: int, page_size: int) -> int:
    """Pages that hold the ``window - 1`` tokens before a block, however they lie; at least 1.

    At worst one of them is the last of a page, and the others begin at the next::

        window 6, pages of 4      . . . x | x x x x | block
    """
    return 1 + -(-max(window - 2, 0) // page_size)


def empty_stores(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, slots: Slots | None = None
) -> tuple[Store, ...]:
    """A store per layer. Layers may differ in geometry, so they are never stacked into one array.

    Args:
        config: The layers.
        num_pages: P, of the pool that block tables name.
        page_size: Tokens of a page.
        dtype: Of keys and values.
        slots: All slots: each gets a ring in the stores of layers with a window, of no more pages than it can
            name. None keeps all layers' tokens in the pool.
    """

    def empty(layer: LayerConfig) -> Store:
        ring, pages = None, num_pages
        if slots is not None and layer.window is not None:
            batch, most = slots.block_tables.shape
            ring = min(ring_pages(layer.window, page_size), most)
            pages = batch * ring
        shape = (pages, page_size, layer.num_kv_heads, layer.head_dim)
        return Store(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), ring)

    return tuple(empty(layer) for layer in config.layers)


def pages_in_store(slots: Slots, logical: Int[Array, "B n"], ring: int | None) -> Int[Array, "B n"]:
    """Which pages of a store with such rings, or with none, are these pages of the slots' sequences.

    Slot 2 with rings of 3 pages::

        page of the sequence      0  1  2  3  4  5  6
        page of the store         6  7  8  6  7  8  6
    """
    if ring is not None:
        return slots.rings[:, None] * ring + logical % ring
    return jnp.take_along_axis(slots.block_tables, logical, axis=1, mode="fill", fill_value=NO_PAGE)


def readable(slots: Slots, ring: int | None, page_size: int) -> tuple[Int32[Array, "B n"], Int32[Array, "B"]]:
    """Block tables and lengths of what a store with such rings holds of each slot; all of it if it has none.

    Of a ring these are the last R pages that have a token. Attention counts positions back from the length,
    so lengths may count from any page on. The ring of 3 pages of slot 0, behind 9 tokens in pages of 2::

        page 0    6 7       tables     [2, 0, 1]
        page 1    8 3       lengths    5, the tokens 4..8
        page 2    4 5
    """
    if ring is None:
        return slots.block_tables, slots.lengths
    first = jnp.maximum(-(-slots.lengths // page_size) - ring, 0)
    logical = first[:, None] + jnp.arange(ring, dtype=jnp.int32)[None, :]
    return pages_in_store(slots, logical, ring), slots.lengths - first * page_size


def attend_over(
    stores: tuple[Store, ...] | None, slots: Slots | None, block: Block, *, implementation: str | None = None
) -> Attend:
    """Attention of a block over the committed tokens of its slots; over the block alone without stores."""
    mask = block.mask()
    # Made once for all layers whose rings are alike.
    parts = {}
    if stores is not None and slots is not None:
        page_size = stores[0].k.shape[1]
        rings = dict.fromkeys(store.ring for store in stores)
        parts = {ring: readable(slots, ring, page_size) for ring in rings}

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
            store = stores[layer]
            prefix = PagedPrefix(store.k, store.v, *parts[store.ring])
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
        stores: One store per layer, with pages of one size.
        stash: For each layer the rows of a block.
        slots: The slots *before* the commit.
        count: Rows to write; 0 leaves a slot as it is. Rows that fall behind a slot's last page are dropped:
            they can only be overshoot of a request that ends with them. Of more rows than a ring holds the
            last are written. It must follow from what the forward over these stores gave: where no data ties
            the write to the last read, XLA copies a store.
        path: Nodes to write, in logical order, which need not be a prefix of the block; what lies behind
            ``count`` may be anything. None is a chain: all rows of the block, as they stand.
        implementation: Of the paged write; None picks the best.
    """
    batch, num_nodes = stash[0].k.shape[:2]
    if path is None:
        path = jnp.broadcast_to(jnp.arange(num_nodes, dtype=jnp.int32)[None, :], (batch, num_nodes))
    step = jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
    position = slots.lengths[:, None] + step
    written = list(stores)
    # One write for all layers whose rings are alike: a launch each would take longer than the bytes.
    for ring in dict.fromkeys(store.ring for store in stores):
        layers = [i for i, store in enumerate(stores) if store.ring == ring]
        num_pages, page_size = stores[layers[0]].k.shape[:2]
        page = pages_in_store(slots, position // page_size, ring)
        # Compared before it is multiplied: a page number that is none may be any, and the product overflow.
        there = (step < count[:, None]) & (page >= 0) & (page < num_pages)
        if ring is not None:
            # No two rows may go to one place, and the older one is out of sight.
            there &= step >= count[:, None] - ring * page_size
        where = jnp.where(there, page * page_size + position % page_size, -1)
        pools = [pool for i in layers for pool in (stores[i].k, stores[i].v)]
        blocks = [rows for i in layers for rows in (stash[i].k, stash[i].v)]
        pools = paged_write(pools, blocks, path, where, implementation=implementation)
        for i, k, v in zip(layers, pools[::2], pools[1::2], strict=True):
            written[i] = replace(stores[i], k=k, v=v)
    return tuple(written)


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
