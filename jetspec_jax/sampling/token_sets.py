"""Sets of tokens, packed: bit t % 32 of word t // 32 says whether token t is one of them."""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32


def packed(tokens: Iterable[int], vocab_size: int) -> UInt32[np.ndarray, "words"]:
    """A set of tokens of a vocabulary, as an array of the host."""
    bits = np.zeros(-(-vocab_size // 32), np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    return bits


def contains(sets: UInt32[Array, "B words"], tokens: Int[Array, "B K"]) -> Bool[Array, "B K"]:
    """Which tokens are in the set of their row; a negative one is in none."""
    words = jnp.take_along_axis(sets, jnp.maximum(tokens, 0) // 32, axis=1)
    bits = (words >> (jnp.maximum(tokens, 0) % 32).astype(jnp.uint32)) & 1
    return (bits == 1) & (tokens >= 0)
