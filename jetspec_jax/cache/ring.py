"""The store of a layer with a window: a ring of few pages per slot, which cover the window.

Page n of a sequence is page n % R of the slot's ring, where it overwrites page n - R, which is outside the
window of all later blocks. A commit only overwrites rows that the forward before it has read.

Shapes: B slots, R pages of a ring or rows of a path.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self, no_type_check

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jetspec_jax.cache.block import Block
from jetspec_jax.cache.paged import PagedStore
from jetspec_jax.cache.slots import Slots
from pallas_kernels.tree_attention import PagedPrefix


def ring_pages(window: int, page_size: int) -> int:
    """The number of pages that can hold the ``window - 1`` tokens before a block at any offset; at least 1.

    In the worst case the first of them is the last token of a page::

        window 6, pages of 4      . . . x | x x x x | block
    """
    return 1 + -(-max(window - 2, 0) // page_size)


# Unchecked by the tests' typing hook: JAX rebuilds pytrees around leaves of any kind.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RingStore(PagedStore):
    """Rings of pages, one for each slot; see `jetspec_jax.cache.stores.Store`.

    ``ring`` is R, the pages of each slot's ring.
    """

    ring: int = field(kw_only=True, metadata={"static": True})

    @property
    def layout(self) -> tuple[object, ...]:
        """Stores of equal layouts have the same row indices."""
        return *super().layout, self.ring

    def with_slot(self, number: Int[Array, ""], other: Any, others: Int[Array, ""]) -> Self:
        """The store with one slot's ring copied from a slot of another store with rings of the same size."""

        def copied(pool: Array, origin: Array) -> Array:
            ring = jax.lax.dynamic_slice_in_dim(origin, others * self.ring, self.ring)
            return jax.lax.dynamic_update_slice_in_dim(pool, ring, number * self.ring, axis=0)

        return replace(self, k=copied(self.k, other.k), v=copied(self.v, other.v))

    def view(self, slots: Slots, block: Block) -> PagedPrefix:
        """The pool, block tables and lengths that attention reads: the last R pages with tokens.

        Attention counts positions back from the length, so lengths may start at any page. The ring of 3 pages
        of slot 0, after 9 tokens in pages of 2::

            page 0    6 7       tables     [2, 0, 1]
            page 1    8 3       lengths    5, the tokens 4..8
            page 2    4 5
        """
        page_size = self.k.shape[1]
        first = jnp.maximum(-(-slots.lengths // page_size) - self.ring, 0)
        logical = first[:, None] + jnp.arange(self.ring, dtype=jnp.int32)[None, :]
        lengths = slots.lengths - first * page_size
        return PagedPrefix(self.k, self.v, self.pages_of(slots, logical), lengths)

    def pages_of(self, slots: Slots, logical: Int[Array, "B n"]) -> Int[Array, "B n"]:
        """The pool's pages for logical pages of the slots' sequences.

        Slot 2 with rings of 3 pages::

            page of the sequence      0  1  2  3  4  5  6
            page of the pool          6  7  8  6  7  8  6
        """
        return slots.numbers[:, None] * self.ring + logical % self.ring

    def keeps(self, step: Int[Array, "1 R"], count: Int[Array, "B 1"]) -> Bool[Array, "B R"]:
        """Whether each row of a path is written: only the last that fit, so no position is written twice."""
        return (step < count) & (step >= count - self.ring * self.k.shape[1])
