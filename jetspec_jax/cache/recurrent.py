"""A recurrent layer's slots: the state after each one's committed tokens, and the last rows before it.

Shapes: B slots, L slots of a selection, N tokens of a block, R rows of a path, T = kernel - 1 rows that a
convolution looks back at, C channels, V value heads, D key size, E value size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, no_type_check

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.config import Recurrence
from jetspec_jax.models.layers import RecurrentRows
from pallas_kernels.gated_delta import advance


class RecurrentPrefix(NamedTuple):
    """What recurrent layers know of committed tokens; all of it is zero for a slot without any.

    Attributes:
        rows: The last ones before the convolution, the oldest first; zero before a sequence's start.
        state: The state after the last of them.
    """

    rows: Float[Array, "B T C"]
    state: Float32[Array, "B V D E"]


# Unchecked by the tests' typing hook: JAX rebuilds pytrees around leaves of any kind.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentStore:
    """A place for each slot; see `jetspec_jax.cache.stores.Store`.

    A forward and a commit take all of its slots, in order. For some of them the store is picked first, and
    put back after the last commit: to gather and scatter states in every round would copy them all.

    Attributes:
        rows: Of all slots, as in `RecurrentPrefix`; of a slot without tokens they may be anything.
        state: Likewise.
    """

    rows: Float[Array, "slots T C"]
    state: Float32[Array, "slots V D E"]

    @property
    def layout(self) -> tuple[object, ...]:
        """Stores of equal layouts have the same sizes."""
        return type(self), self.rows.shape, self.state.shape

    @property
    def num_bytes(self) -> int:
        """Bytes of rows and states."""
        return sum(array.size * array.dtype.itemsize for array in (self.rows, self.state))

    def specs(self, axes: tuple[str, ...]) -> Self:
        """How a mesh splits the store: by heads, the rows by what goes with them."""
        return replace(self, rows=PartitionSpec(None, None, axes), state=PartitionSpec(None, axes))

    def pick(self, numbers: Int[Array, "L"]) -> Self:
        """What lies in these slots' places, in places of their own."""
        return replace(self, rows=self.rows[numbers], state=self.state[numbers])

    def put(self, numbers: Int[Array, "L"], picked: Self) -> Self:
        """The store with what was picked back in its places; no number may occur twice."""
        rows = self.rows.at[numbers].set(picked.rows, unique_indices=True)
        return replace(self, rows=rows, state=self.state.at[numbers].set(picked.state, unique_indices=True))

    def with_slot(self, number: Int[Array, ""], other: Self, others: Int[Array, ""]) -> Self:
        """The store in which a slot knows what some slot knows in another one."""
        return self.put(number[None], other.pick(others[None]))

    def view(self, slots: Slots, block: Block) -> RecurrentPrefix:
        """What the slots know of their committed tokens."""
        return _zero_unless(slots.lengths > 0, RecurrentPrefix(self.rows, self.state))

    def commit(
        self, slots: Slots, stash: RecurrentRows, path: Int32[Array, "B R"], count: Int[Array, "B"]
    ) -> Self:
        """The store with each slot's state after the first ``count`` nodes of its path."""
        # A slot that nothing is written to keeps its bits, also those of a slot that is free.
        keep = (slots.lengths > 0) | (count == 0)
        old = _zero_unless(keep, RecurrentPrefix(self.rows, self.state))
        state = advance(old.state, stash.k, stash.delta, stash.decay, path, count)
        return replace(self, rows=_last_rows(old.rows, stash.rows, path, count), state=state)

    @classmethod
    def commit_alike(
        cls,
        stores: Sequence[Self],
        slots: Slots,
        stash: Sequence[RecurrentRows],
        path: Int32[Array, "B R"],
        count: Int[Array, "B"],
    ) -> list[Self]:
        """`commit` of several stores, one after the other."""
        return [store.commit(slots, own, path, count) for store, own in zip(stores, stash, strict=True)]


def empty_recurrent_store(num_slots: int, recurrence: Recurrence, dtype: jnp.dtype) -> RecurrentStore:
    """A store for slots without tokens.

    Args:
        num_slots: How many.
        recurrence: The layer's sizes.
        dtype: Of the rows; states are float32.
    """
    size = recurrence
    state = num_slots, size.num_value_heads, size.key_dim, size.value_dim
    return RecurrentStore(
        jnp.zeros((num_slots, size.kernel - 1, size.channels), dtype), jnp.zeros(state, jnp.float32)
    )


def _zero_unless(keep: Bool[Array, "B"], prefix: RecurrentPrefix) -> RecurrentPrefix:
    """What slots know, or zero; a product with zero would keep what is no number."""
    rows = jnp.where(keep[:, None, None], prefix.rows, 0)
    return RecurrentPrefix(rows, jnp.where(keep[:, None, None, None], prefix.state, 0))


def _last_rows(
    old: Float[Array, "B T C"],
    new: Float[Array, "B N C"],
    path: Int32[Array, "B R"],
    count: Int[Array, "B"],
) -> Float[Array, "B T C"]:
    """The last rows of the old ones and, after them, the first ``count`` of the path.

    Old rows a b c and a path to rows p, q and r, of which ``count`` are taken::

        count 0    a b c        count 2    c p q        count 3    p q r
    """
    kept = old.shape[1]
    index = count[:, None] + jnp.arange(kept, dtype=jnp.int32)[None, :]
    node = jnp.take_along_axis(path, index - kept, axis=1, mode="clip")
    of_old = jnp.take_along_axis(old, index[:, :, None], axis=1, mode="clip")
    of_new = jnp.take_along_axis(new, node[:, :, None], axis=1, mode="clip")
    return jnp.where((index < kept)[:, :, None], of_old, of_new)
