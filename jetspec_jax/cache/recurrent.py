"""A recurrent layer's store: for each slot, the state after its committed tokens, and their last rows.

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
    """A recurrent layer's state after the committed tokens; zero for a slot without tokens.

    Attributes:
        rows: The last projected rows, oldest first, with zeros before the start of a sequence.
        state: The recurrent state.
    """

    rows: Float[Array, "B T C"]
    state: Float32[Array, "B V D E"]


# Unchecked by the tests' typing hook: JAX rebuilds pytrees around leaves of any kind.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RecurrentStore:
    """An entry for each slot; see `jetspec_jax.cache.stores.Store`.

    Forwards and commits use all slots of the store in order. To use only some slots, `pick` them first and
    `put` them back after the last commit; gathering and scattering in every round would copy all states.

    Attributes:
        rows: The rows of all slots, as in `RecurrentPrefix`; arbitrary for slots without tokens.
        state: The states of all slots; arbitrary for slots without tokens.
    """

    rows: Float[Array, "slots T C"]
    state: Float32[Array, "slots V D E"]

    @property
    def layout(self) -> tuple[object, ...]:
        """Stores of equal layouts have the same sizes."""
        return type(self), self.rows.shape, self.state.shape

    def specs(self, axes: tuple[str, ...]) -> Self:
        """Partition specs of the store: states are sharded by heads, rows by the heads' channels."""
        return replace(self, rows=PartitionSpec(None, None, axes), state=PartitionSpec(None, axes))

    def pick(self, numbers: Int[Array, "L"]) -> Self:
        """A store with only these slots' entries."""
        return replace(self, rows=self.rows[numbers], state=self.state[numbers])

    def put(self, numbers: Int[Array, "L"], picked: Self) -> Self:
        """The store with picked entries written back; slot numbers must be unique."""
        rows = self.rows.at[numbers].set(picked.rows, unique_indices=True)
        return replace(self, rows=rows, state=self.state.at[numbers].set(picked.state, unique_indices=True))

    def with_slot(self, number: Int[Array, ""], other: Self, others: Int[Array, ""]) -> Self:
        """The store with one slot's entry copied from a slot of another store."""
        return self.put(number[None], other.pick(others[None]))

    def view(self, slots: Slots, block: Block) -> RecurrentPrefix:
        """The slots' rows and states, with zeros for slots without tokens."""
        return _zero_unless(slots.lengths > 0, RecurrentPrefix(self.rows, self.state))

    @classmethod
    def commit_alike(
        cls,
        stores: Sequence[Self],
        slots: Slots,
        stash: Sequence[RecurrentRows],
        path: Int32[Array, "B R"],
        count: Int[Array, "B"],
    ) -> list[Self]:
        """The stores after the first ``count`` nodes of each slot's path."""
        # A slot with a count of 0 keeps its bits, even if it is free.
        keep = (slots.lengths > 0) | (count == 0)
        written = []
        for store, new in zip(stores, stash, strict=True):
            old = _zero_unless(keep, RecurrentPrefix(store.rows, store.state))
            state = advance(old.state, new.k, new.delta, new.decay, path, count)
            rows = _last_rows(old.rows, new.rows, path, count)
            written.append(replace(store, rows=rows, state=state))
        return written


def empty_recurrent_store(num_slots: int, recurrence: Recurrence, dtype: jnp.dtype) -> RecurrentStore:
    """A store for slots without tokens, with rows of type ``dtype`` and states in float32."""
    size = recurrence
    state = num_slots, size.num_value_heads, size.key_dim, size.value_dim
    return RecurrentStore(
        jnp.zeros((num_slots, size.kernel - 1, size.channels), dtype), jnp.zeros(state, jnp.float32)
    )


def _zero_unless(keep: Bool[Array, "B"], prefix: RecurrentPrefix) -> RecurrentPrefix:
    """The prefix, or zeros where ``keep`` is false; multiplying by zero would keep NaN."""
    rows = jnp.where(keep[:, None, None], prefix.rows, 0)
    return RecurrentPrefix(rows, jnp.where(keep[:, None, None, None], prefix.state, 0))


def _last_rows(
    old: Float[Array, "B T C"],
    new: Float[Array, "B N C"],
    path: Int32[Array, "B R"],
    count: Int[Array, "B"],
) -> Float[Array, "B T C"]:
    """The last T rows of the old rows followed by the first ``count`` rows of the path.

    Old rows a b c, and a path with the rows p q r::

        count 0    a b c        count 2    c p q        count 3    p q r
    """
    kept = old.shape[1]
    index = count[:, None] + jnp.arange(kept, dtype=jnp.int32)[None, :]
    node = jnp.take_along_axis(path, index - kept, axis=1, mode="clip")
    of_old = jnp.take_along_axis(old, index[:, :, None], axis=1, mode="clip")
    of_new = jnp.take_along_axis(new, node[:, :, None], axis=1, mode="clip")
    return jnp.where((index < kept)[:, :, None], of_old, of_new)
