"""What was committed and the proposer has not seen: of each slot a queue of tapped rows.

Prefills and plain rounds put rows in, and before the next draft the proposer is shown them. So a request that
ends undrafted costs the proposer nothing. The rows lie in one array that stays where it is: XLA makes the
launches of a program anew when its arrays have moved, which was 5 % of a plain dispatch on an H200.

Shapes: B slots, R rows of a queue, T new rows, F features of all taps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.cache import Slots
from jetspec_jax.proposer import Proposer

#: Rows that one `feed` shows: a queue's rows are a multiple of them.
FEED_ROWS = 128


def feeds_for(rows: int) -> int:
    """How many times `feed` is called to show so many rows of a slot."""
    return -(-rows // FEED_ROWS)


class Unseen(NamedTuple):
    """The queues of all slots. The last row of each belongs to the last token in the slot's stores.

    Attributes:
        taps: The rows; what lies behind those that count is padding.
        marks: Of each queue, how many rows were put in, and how many of them the proposer has seen.
    """

    taps: Float[Array, "B R F"]
    # One array for both: every one that a program takes and returns costs the launch some 20 us.
    marks: Int[Array, "B 2"]

    @classmethod
    def empty(cls, slots: int, rows: int, features: int, dtype: jnp.dtype) -> "Unseen":
        """Empty queues of at least so many rows."""
        rows = max(feeds_for(rows), 1) * FEED_ROWS
        return cls(jnp.zeros((slots, rows, features), dtype), jnp.zeros((slots, 2), jnp.int32))

    @property
    def counts(self) -> Int[Array, "B"]:
        """How many rows were put into each queue."""
        return self.marks[:, 0]

    @property
    def shown(self) -> Int[Array, "B"]:
        """How many of them the proposer has seen."""
        return self.marks[:, 1]

    def append(self, taps: Float[Array, "B T F"], counts: Int[Array, "B"]) -> "Unseen":
        """Puts rows into all queues. Each must have room for T rows, though fewer may count.

        Raises:
            ValueError: No queue has that room.
        """
        self._check(taps)
        put = jax.vmap(lambda own, new, count: jax.lax.dynamic_update_slice(own, new, (count, 0)))
        return Unseen(put(self.taps, taps, self.counts), self.marks.at[:, 0].add(counts))

    def append_to(
        self, slot: Int[Array, ""], taps: Float[Array, "1 T F"], count: Int[Array, "1"]
    ) -> "Unseen":
        """`append` for one slot."""
        self._check(taps)
        put = jax.lax.dynamic_update_slice(self.taps, taps, (slot, self.counts[slot], 0))
        return Unseen(put, self.marks.at[slot, 0].add(count[0]))

    def clear(self, slot: Int[Array, "*slots"]) -> "Unseen":
        """Empties the queue of a slot, or of several."""
        return self._replace(marks=self.marks.at[slot].set(0))

    def _check(self, taps: Float[Array, "B T F"]) -> None:
        new, room = taps.shape[1], self.taps.shape[1]
        if new > room:
            raise ValueError(
                f"{new} tokens are committed before the proposer sees them, and the state has room for "
                f"{room}: take empty_state(..., unseen_rows={new})"
            )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=(2, 3))
def feed(
    proposer: Proposer, weights: Any, state: Any, unseen: Unseen, slots: Slots, slot: Int[Array, ""]
) -> tuple[Any, Unseen]:
    """Shows the proposer the next rows of a slot's queue, `FEED_ROWS` at most.

    Args:
        proposer: The proposer.
        weights: Its parameters.
        state: Its state; donated.
        unseen: The queues; donated.
        slots: All slots.
        slot: Which is shown.

    Returns:
        The proposer's state, and the queues. One that was shown to its end is empty.
    """
    shown = unseen.shown[slot]
    left = unseen.counts[slot] - shown
    count = jnp.minimum(left, FEED_ROWS)
    taps = jax.lax.dynamic_slice(unseen.taps, (slot, shown, 0), (1, FEED_ROWS, unseen.taps.shape[2]))
    own = jax.tree.map(lambda x: x[slot][None], slots)
    state = proposer.commit(weights, state, taps, own._replace(lengths=own.lengths - left), count[None])
    marks = jnp.where(count == left, 0, jnp.stack([unseen.counts[slot], shown + count]))
    return state, unseen._replace(marks=unseen.marks.at[slot].set(marks))
