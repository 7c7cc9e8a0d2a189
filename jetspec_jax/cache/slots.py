"""Slots: the positions of a batch's committed tokens in the stores. Shapes: B slots, T pages per slot."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Slots(NamedTuple):
    """The block tables and lengths of slots.

    Attributes:
        block_tables: Pages of each slot in logical order, or `NO_PAGE`; shared by all stores with pages.
        lengths: Number of committed tokens of each slot, S.
        numbers: Each slot's number, for stores with one entry per slot.
    """

    block_tables: Int32[Array, "B T"]
    lengths: Int32[Array, "B"]
    numbers: Int32[Array, "B"]

    @classmethod
    def of(cls, block_tables: Int32[Array, "B T"], lengths: Int32[Array, "B"]) -> "Slots":
        """All slots in order."""
        return cls(block_tables, lengths, jnp.arange(len(lengths), dtype=jnp.int32))
