"""Stores of committed tokens, one for each layer, and what every kind of store can do.

A store holds committed tokens only. A forward reads stores and never writes them; what it computes for its
block is a stash, and a commit writes the rows of the accepted path, once. Nothing is ever rolled back.

Shapes: B slots, L slots of a selection, N nodes of a block, R rows of a path, P pages.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from jetspec_jax.cache.block import Block
from jetspec_jax.cache.paged import empty_paged_store
from jetspec_jax.cache.recurrent import empty_recurrent_store
from jetspec_jax.cache.ring import RingStore, ring_pages
from jetspec_jax.cache.slots import Slots
from jetspec_jax.config import ModelConfig
from jetspec_jax.sampling.token_sets import NO_CHOICE


@runtime_checkable
class Store(Protocol):
    """What one layer keeps of the committed tokens of all slots: a pytree."""

    @property
    def layout(self) -> object:
        """Hashable; stores of equal layouts can be committed together."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        ...

    def specs(self, axes: tuple[str, ...]) -> "Store":
        """The store with specs in place of arrays: how a mesh with these axes splits each."""
        ...

    def pick(self, numbers: Int[Array, "L"]) -> "Store":
        """The store as these slots alone see it: what has a place for each slot is copied, pages stay."""
        ...

    def put(self, numbers: Int[Array, "L"], picked: Any) -> "Store":
        """The inverse of `pick`: the store after what was picked of it has been committed to."""
        ...

    def with_slot(self, number: Int[Array, ""], other: Any, others: Int[Array, ""]) -> "Store":
        """The store in which a slot has what slot ``others`` has in another store of its kind.

        This is what has a place for each slot; pages are shared by their numbers.
        """
        ...

    def view(self, slots: Slots, block: Block) -> Any:
        """What the layer's operation needs of some slots for a block after their tokens; copies no pages."""
        ...

    def commit(self, slots: Slots, stash: Any, path: Int32[Array, "B R"], count: Int[Array, "B"]) -> "Store":
        """The store with the first ``count[b]`` nodes of each path: see the function `commit`."""
        ...

    @classmethod
    def commit_alike(
        cls,
        stores: Sequence[Any],
        slots: Slots,
        stash: Sequence[Any],
        path: Int32[Array, "B R"],
        count: Int[Array, "B"],
    ) -> Sequence["Store"]:
        """`commit` of several stores of one layout, in as few launches as can be."""
        ...


def empty_stores(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, slots: Slots | None = None
) -> tuple[Store, ...]:
    """A store for each layer. Layers may differ in geometry, so they are never stacked into one array.

    Args:
        config: The layers.
        num_pages: P, of the pool that block tables name.
        page_size: Tokens of a page.
        dtype: Of keys and values, and of a convolution's rows.
        slots: All slots: each gets a ring in the stores of layers with a window, of no more pages than it can
            name, and a state in those of recurrent layers. None keeps all layers' tokens in the pool.

    Raises:
        ValueError: A layer is recurrent, and there are no slots.
    """
    stores: list[Store] = []
    for layer in config.layers:
        if layer.recurrence is not None:
            if slots is None:
                raise ValueError("a recurrent layer keeps a state for each slot, and there are no slots")
            stores.append(empty_recurrent_store(len(slots.lengths), layer.recurrence, dtype))
            continue
        rows = page_size, layer.num_kv_heads, layer.head_dim, dtype
        if slots is None or layer.window is None:
            stores.append(empty_paged_store(num_pages, *rows))
            continue
        batch, most = slots.block_tables.shape
        ring = min(ring_pages(layer.window, page_size), most)
        empty = empty_paged_store(batch * ring, *rows)
        stores.append(RingStore(empty.k, empty.v, ring=ring))
    return tuple(stores)


def commit(
    stores: Sequence[Store],
    slots: Slots,
    stash: Sequence[Any],
    path: Int32[Array, "B R"],
    count: Int[Array, "B"],
) -> tuple[Store, ...]:
    """Writes the first ``count[b]`` nodes of each slot's path after its committed tokens, in all layers.

    Example: of nodes 0..3 with the path 0, 2, -1 and a count of 2, rows 0 and 2 follow the committed ones.

    Args:
        stores: One for each layer.
        slots: The slots *before* the commit.
        stash: For each layer what a forward made of the block's nodes.
        path: Nodes to write, in logical order, which need not be a prefix of the block; after ``count`` there
            may be anything.
        count: Nodes to write; 0 leaves a slot as it is. Rows that fall after a slot's last page are dropped:
            they can only be overshoot of a request that ends with them. A forward that reads these stores
            must come first: see `after_forward`.
    """
    written = list(stores)
    for layout in dict.fromkeys(store.layout for store in stores):
        alike = [i for i, store in enumerate(stores) if store.layout == layout]
        own = [stores[i] for i in alike]
        new = type(own[0]).commit_alike(own, slots, [stash[i] for i in alike], path, count)
        for i, store in zip(alike, new, strict=True):
            written[i] = store
    return tuple(written)


def chain_path(batch: int, length: int) -> Int32[Array, "B N"]:
    """The path of a chain: all nodes of the block, as they stand."""
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (batch, length))


def after_forward(count: Int[Array, "B"], choices: Int[Array, "B N"]) -> Int[Array, "B"]:
    """``count``, as a value that only the end of the forward gives.

    Where no data ties a commit to the forward that reads the same stores, XLA may order the write first, and
    then copies a store. No choice is below `NO_CHOICE`, but XLA does not know it.
    """
    return jnp.where(jnp.all(choices >= NO_CHOICE, axis=1), count, 0)
