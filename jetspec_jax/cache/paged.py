"""A layer's keys and values in the pages of a pool, which slots reference by block tables.

Shapes: B slots, L slots of a selection, P pages, T pages per slot, R rows of a path, G KV heads, E head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self, no_type_check

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Int32

from jetspec_jax.cache.block import Block
from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.cache.slots import Slots
from jetspec_jax.models.layers import KV
from pallas_kernels.paged_write import paged_write
from pallas_kernels.tree_attention import PagedPrefix


# Unchecked by the tests' typing hook: JAX rebuilds pytrees around leaves of any kind.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedStore:
    """A pool of pages that slots reference by block tables; see `jetspec_jax.cache.stores.Store`."""

    k: Float[Array, "P page G E"]
    v: Float[Array, "P page G E"]

    @property
    def layout(self) -> tuple[object, ...]:
        """Stores of equal layouts have the same row indices."""
        return type(self), *self.k.shape[:2]

    def specs(self, axes: tuple[str, ...]) -> Self:
        """Partition specs of the store, which is sharded by KV heads."""
        spec = PartitionSpec(None, None, axes)
        return replace(self, k=spec, v=spec)

    def pick(self, numbers: Int[Array, "L"]) -> Self:
        """The store itself: slots reference pages by block tables."""
        return self

    def put(self, numbers: Int[Array, "L"], picked: Self) -> Self:
        """The picked store, which is the whole store."""
        return picked

    def with_slot(self, number: Int[Array, ""], other: Any, others: Int[Array, ""]) -> Self:
        """The store itself, which has no entries per slot."""
        return self

    def view(self, slots: Slots, block: Block) -> PagedPrefix:
        """The pool, block tables and lengths that attention reads."""
        return PagedPrefix(self.k, self.v, slots.block_tables, slots.lengths)

    @classmethod
    def commit_alike(
        cls,
        stores: Sequence[Self],
        slots: Slots,
        stash: Sequence[KV],
        path: Int32[Array, "B R"],
        count: Int[Array, "B"],
    ) -> list[Self]:
        """Writes the rows of all stores at once, which saves a launch per layer."""
        first = stores[0]
        num_pages, page_size = first.k.shape[:2]
        step = jnp.arange(path.shape[1], dtype=jnp.int32)[None, :]
        position = slots.lengths[:, None] + step
        page = first.pages_of(slots, position // page_size)
        # Checked before the multiplication: an invalid page number may be any integer and could overflow.
        there = (page >= 0) & (page < num_pages) & first.keeps(step, count[:, None])
        places = jnp.where(there, page * page_size + position % page_size, -1)
        pools = [pool for store in stores for pool in (store.k, store.v)]
        pools = paged_write(pools, [rows for kv in stash for rows in (kv.k, kv.v)], path, places)
        written = zip(stores, pools[::2], pools[1::2], strict=True)
        return [replace(store, k=k, v=v) for store, k, v in written]

    def pages_of(self, slots: Slots, logical: Int[Array, "B n"]) -> Int[Array, "B n"]:
        """The pool's pages for logical pages of the slots' sequences; `NO_PAGE` after the last."""
        return jnp.take_along_axis(slots.block_tables, logical, axis=1, mode="fill", fill_value=NO_PAGE)

    def keeps(self, step: Int[Array, "1 R"], count: Int[Array, "B 1"]) -> Bool[Array, "B R"]:
        """Whether each row of a path is written."""
        return step < count


def empty_paged_store(
    num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype
) -> PagedStore:
    """A pool of zeros."""
    shape = (num_pages, page_size, num_kv_heads, head_dim)
    return PagedStore(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
