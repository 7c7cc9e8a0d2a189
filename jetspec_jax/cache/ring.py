"""A layer with a window: each slot has a ring of a few pages, because nobody looks back any further.

Page n of a sequence lies in page n % R of the slot's ring, over page n - R, which no later block sees. What a
commit overwrites, the forward before it has read.

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
    """Pages that hold the ``window - 1`` tokens before a block, however they lie; at least 1.

    At worst one of them is the last of a page, and the others begin at the next::

        window 6, pages of 4      . . . x | x x x x | block
    """
    return 1 + -(-max(window - 2, 0) // page_size)


# Unchecked by the tests' typing hook: JAX rebuilds pytrees around leaves of any kind.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RingStore(PagedStore):
    """Rings of pages, one for each slot; see `jetspec_jax.cache.stores.Store`.

    Attributes:
        ring: R, pages of each slot's ring.
    """

    ring: int = field(kw_only=True, metadata={"static": True})

    @property
    def layout(self) -> tuple[object, ...]:
        """Stores of equal layouts have their rows at equal places."""
        return *super().layout, self.ring

    def with_slot(self, number: Int[Array, ""], other: Any, others: Int[Array, ""]) -> Self:
        """The store in which a slot's ring is as that of some slot is in another one, of equal rings."""

        def copied(own: Array, origin: Array) -> Array:
            ring = jax.lax.dynamic_slice_in_dim(origin, others * self.ring, self.ring)
            return jax.lax.dynamic_update_slice_in_dim(own, ring, number * self.ring, axis=0)

        return replace(self, k=copied(self.k, other.k), v=copied(self.v, other.v))

    def view(self, slots: Slots, block: Block) -> PagedPrefix:
        """What attention reads: the last R pages that have a token.

        Attention counts positions back from the length, so lengths may count from any page on. The ring of 3
        pages of slot 0, after 9 tokens in pages of 2::

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
        """Which pages of the pool are these pages of the slots' sequences.

        Slot 2 with rings of 3 pages::

            page of the sequence      0  1  2  3  4  5  6
            page of the pool          6  7  8  6  7  8  6
        """
        return slots.numbers[:, None] * self.ring + logical % self.ring

    def keeps(self, step: Int[Array, "1 R"], count: Int[Array, "B 1"]) -> Bool[Array, "B R"]:
        """Which rows of a path are written: of more than a ring holds the last, each place once."""
        return (step < count) & (step >= count - self.ring * self.k.shape[1])
