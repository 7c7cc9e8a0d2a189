"""What was committed and the proposer has not seen: of each slot the taps of its last tokens.

Prefills and plain rounds write them, and before the next draft the proposer is shown them. So a request that
ends undrafted costs the proposer nothing. How many tokens it has seen the host knows, which keeps one array
out of every program; and the rows lie where they are, token p in row p % R: XLA makes the launches of a
program anew when its arrays have moved, which was 5 % of a plain dispatch on an H200.

They are kept as 32-bit words. So a plain round writes its taps with its record, in one launch, and XLA:CPU,
which makes a float32 copy of a 16-bit array that it scatters into, has none to make.

Shapes: B slots, R rows of a slot, T new rows, F features of all taps, W words that they are.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from jetspec_jax.cache.stores import Slots
from jetspec_jax.decode.proposer import Proposer

#: Rows that one `feed` shows: a slot's rows are a multiple of them.
FEED_ROWS = 128


def feeds_for(rows: int) -> int:
    """How many times `feed` is called to show so many rows of a slot."""
    return -(-rows // FEED_ROWS)


def empty_rows(slots: int, rows: int, features: int, dtype: jnp.dtype) -> Int32[Array, "B R W"]:
    """At least so many rows for each slot."""
    rows = max(feeds_for(rows), 1) * FEED_ROWS
    return jnp.zeros((slots, rows, words_of(features, dtype)), jnp.int32)


def write_rows(
    unseen: Int32[Array, "B R W"],
    slots: Int[Array, "S"],
    taps: Int32[Array, "S T W"],
    starts: Int[Array, "S"],
) -> Int32[Array, "B R W"]:
    """Puts the taps of tokens ``starts`` and after into the rows of some slots.

    All T rows are written, though fewer may count: they overwrite what stood R tokens before.

    Raises:
        ValueError: A slot has fewer rows.
    """
    new, room = taps.shape[1], unseen.shape[1]
    if new > room:
        raise ValueError(
            f"{new} tokens are committed before the proposer sees them, and the state has room for {room}: "
            f"take empty_state(..., unseen_rows={new})"
        )
    rows = (starts[:, None] + jnp.arange(new, dtype=jnp.int32)[None, :]) % room
    return unseen.at[slots[:, None], rows].set(taps, unique_indices=True)


def as_words(taps: Float[Array, "*rows F"]) -> Int32[Array, "*rows W"]:
    """The bits of taps; of 16-bit taps a word holds one of the first half and one of the second::

        a b c d e     ->     a,d  b,e  c,0

    Neighbours in one word would be a bitcast, before which XLA:GPU puts the taps together in a launch of its
    own: of 108 in a demo round.
    """
    if taps.dtype.itemsize == 4:
        return taps.view(jnp.int32)
    assert taps.dtype.itemsize == 2, f"weights are float32, bfloat16 or float16, not {taps.dtype}"
    bits, half = taps.view(jnp.uint16).astype(jnp.int32), words_of(taps.shape[-1], taps.dtype)
    upper = bits[..., half:] << 16
    return bits[..., :half] | jnp.pad(upper, [(0, 0)] * (bits.ndim - 1) + [(0, 2 * half - bits.shape[-1])])


def from_words(words: Int32[Array, "*rows W"], features: int, dtype: jnp.dtype) -> Float[Array, "*rows F"]:
    """The inverse of `as_words`."""
    if dtype.itemsize == 4:
        return words.view(dtype)
    bits = jnp.concatenate([words, words >> 16], axis=-1)[..., :features]
    return bits.astype(jnp.uint16).view(dtype)


def words_of(features: int, dtype: jnp.dtype) -> int:
    """How many words so many taps are."""
    return -(-features * dtype.itemsize // 4)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("features", "dtype"), donate_argnums=2)
def feed(
    proposer: Proposer,
    weights: Any,
    state: Any,
    unseen: Int32[Array, "B R W"],
    slots: Slots,
    slot: Int[Array, ""],
    seen: Int[Array, ""],
    *,
    features: int,
    dtype: jnp.dtype,
) -> Any:
    """Shows the proposer the next tokens of a slot, `FEED_ROWS` at most.

    Args:
        proposer: The proposer.
        weights: Its parameters.
        state: Its state; donated.
        unseen: The taps, as words.
        slots: All slots.
        slot: Which is shown.
        seen: How many of its tokens the proposer has seen: at least all but R.
        features: F.
        dtype: Of the taps.

    Returns:
        The proposer's state.
    """
    rows = (seen + jnp.arange(FEED_ROWS, dtype=jnp.int32)) % unseen.shape[1]
    taps = from_words(unseen[slot, rows][None], features, dtype)
    own = jax.tree.map(lambda x: x[slot][None], slots)
    count = jnp.clip(own.lengths - seen, 0, FEED_ROWS)
    return proposer.commit(weights, state, taps, own._replace(lengths=seen[None]), count)
