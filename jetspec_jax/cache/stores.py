"""Stores of committed tokens, one per layer, and their protocol.

A store holds only committed tokens. A forward reads stores but does not write them; it returns the block's
rows as a stash, and a commit writes the rows of the accepted path. So nothing is ever rolled back.

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
    """One layer's data of the committed tokens of all slots: a pytree."""

    @property
    def layout(self) -> object:
        """A hashable value; stores of equal layouts can be committed together."""
        ...

    def specs(self, axes: tuple[str, ...]) -> "Store":
        """The store with partition specs in place of arrays, for a mesh with these axes."""
        ...

    def pick(self, numbers: Int[Array, "L"]) -> "Store":
        """The store for these slots only: entries per slot are copied, pages are not."""
        ...

    def put(self, numbers: Int[Array, "L"], picked: Any) -> "Store":
        """The inverse of `pick`: the store with the picked entries, after commits, written back."""
        ...

    def with_slot(self, number: Int[Array, ""], other: Any, others: Int[Array, ""]) -> "Store":
        """The store with the entry of slot ``number`` copied from slot ``others`` of another store.

        Only entries per slot are copied; pages are shared by their numbers.
        """
        ...

    def view(self, slots: Slots, block: Block) -> Any:
        """The arrays that the layer's attention or recurrence reads for a block; pages are not copied."""
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
        """Stores of one layout with the first ``count[b]`` nodes of each path; see `commit`."""
        ...


def empty_stores(
    config: ModelConfig, num_pages: int, page_size: int, dtype: jnp.dtype, slots: Slots | None = None
) -> tuple[Store, ...]:
    """Empty stores, one per layer. Layers may differ in geometry, so they are not stacked into one array.

    Given all ``slots``, each gets a ring in layers with a window, of at most as many pages as its block table
    has, and a state in recurrent layers. None: all layers use the pool, and none is recurrent.
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
    """Appends the first ``count[b]`` nodes of each slot's path to its committed tokens, in all layers.

    Example: for nodes 0..3, the path 0, 2, -1 and a count of 2, rows 0 and 2 are appended.

    Args:
        stores: One store per layer.
        slots: The slots *before* the commit.
        stash: The rows of the block's nodes from a forward, per layer.
        path: Nodes to write, in logical order, not necessarily a prefix of the block; arbitrary after
            ``count``.
        count: Number of nodes to write; 0 leaves a slot unchanged. Rows after a slot's last page are dropped:
            they are overshoot of a request that ends there. It must depend on the forward that reads these
            stores, see `after_forward`.
    """
    written = list(stores)
    for layout in dict.fromkeys(store.layout for store in stores):
        alike = [i for i, store in enumerate(stores) if store.layout == layout]
        group = [stores[i] for i in alike]
        new = type(group[0]).commit_alike(group, slots, [stash[i] for i in alike], path, count)
        for i, store in zip(alike, new, strict=True):
            written[i] = store
    return tuple(written)


def chain_path(batch: int, length: int) -> Int32[Array, "B N"]:
    """The path of a chain: all nodes of the block in order."""
    return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None, :], (batch, length))


def after_forward(count: Int[Array, "B"], choices: Int[Array, "B N"]) -> Int[Array, "B"]:
    """``count``, made dependent on the result of a forward.

    Without a data dependency XLA may schedule a commit before the forward that reads the same stores, and
    would then have to copy them. No choice is below `NO_CHOICE`, so ``count`` does not change, but XLA cannot
    know.
    """
    return jnp.where(jnp.all(choices >= NO_CHOICE, axis=1), count, 0)
