"""What was committed and the proposer has not seen: of each slot the taps of its last tokens.

Prefills and plain rounds write them, and before the next draft the proposer is shown them. So a request that
ends undrafted costs the proposer nothing. How many tokens it has seen the host knows, which keeps one array
out of every program; and the rows lie where they are, token p in row p % R: XLA makes the launches of a
program anew when its arrays have moved, which was 5 % of a plain dispatch on an H200.

Shapes: B slots, R rows of a slot, T new rows, F features of all taps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.cache import Slots
from jetspec_jax.proposer import Proposer

#: Rows that one `feed` shows: a slot's rows are a multiple of them.
FEED_ROWS = 128


def feeds_for(rows: int) -> int:
    """How many times `feed` is called to show so many rows of a slot."""
    return -(-rows // FEED_ROWS)


def empty_rows(slots: int, rows: int, features: int, dtype: jnp.dtype) -> Float[Array, "B R F"]:
    """At least so many rows for each slot."""
    return jnp.zeros((slots, max(feeds_for(rows), 1) * FEED_ROWS, features), dtype)


def write_rows(
    unseen: Float[Array, "B R F"],
    slots: Int[Array, "S"],
    taps: Float[Array, "S T F"],
    starts: Int[Array, "S"],
) -> Float[Array, "B R F"]:
    """Puts the taps of tokens ``starts`` and after into the rows of some slots.

    All T rows are written, though fewer may count: they overwrite what stood R tokens before.

    Raises:
        ValueError: A slot has fewer rows.
    """
    check_room(unseen, taps.shape[1])
    rows = (starts[:, None] + jnp.arange(taps.shape[1], dtype=jnp.int32)[None, :]) % unseen.shape[1]
    if rows.shape == (1, 1):
        # Before a scatter XLA:GPU puts the taps together in a launch of its own: of 109 in a demo round.
        return jax.lax.dynamic_update_slice(unseen, taps, (slots[0], rows[0, 0], jnp.int32(0)))
    return unseen.at[slots[:, None], rows].set(taps, unique_indices=True)


def check_room(unseen: Float[Array, "B R F"], new: int) -> None:
    """Checks that a program may commit so many tokens of a slot before the proposer sees any.

    Raises:
        ValueError: A slot has fewer rows.
    """
    if new > unseen.shape[1]:
        raise ValueError(
            f"{new} tokens are committed before the proposer sees them, and the state has room for "
            f"{unseen.shape[1]}: take empty_state(..., unseen_rows={new})"
        )


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def feed(
    proposer: Proposer,
    weights: Any,
    state: Any,
    unseen: Float[Array, "B R F"],
    slots: Slots,
    slot: Int[Array, ""],
    seen: Int[Array, ""],
) -> Any:
    """Shows the proposer the next tokens of a slot, `FEED_ROWS` at most.

    Args:
        proposer: The proposer.
        weights: Its parameters.
        state: Its state; donated.
        unseen: The taps.
        slots: All slots.
        slot: Which is shown.
        seen: How many of its tokens the proposer has seen: at least all but R.

    Returns:
        The proposer's state.
    """
    rows = (seen + jnp.arange(FEED_ROWS, dtype=jnp.int32)) % unseen.shape[1]
    own = jax.tree.map(lambda x: x[slot][None], slots)
    count = jnp.clip(own.lengths - seen, 0, FEED_ROWS)
    return proposer.commit(weights, state, unseen[slot, rows][None], own._replace(lengths=seen[None]), count)
