"""Slots: where the sequences of a batch keep their committed tokens. Shapes: B slots, T pages per slot."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int32


class Slots(NamedTuple):
    """Where each slot's committed tokens lie, and how many they are.

    Attributes:
        block_tables: Pages of each slot in logical order, or `NO_PAGE`; they serve all stores with pages.
        lengths: Committed tokens of each slot, S.
        numbers: Each slot's own number, for stores in which each slot has a fixed place.
    """

    block_tables: Int32[Array, "B T"]
    lengths: Int32[Array, "B"]
    numbers: Int32[Array, "B"]

    @classmethod
    def of(cls, block_tables: Int32[Array, "B T"], lengths: Int32[Array, "B"]) -> "Slots":
        """All the slots there are, in order."""
        return cls(block_tables, lengths, jnp.arange(len(lengths), dtype=jnp.int32))
