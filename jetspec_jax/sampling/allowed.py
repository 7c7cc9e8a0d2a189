"""Packed sets of tokens on the device: see `jetspec_jax.sampling.token_sets`."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import shards


def contains(sets: UInt32[Array, "B words"], tokens: Int[Array, "B K"]) -> Bool[Array, "B K"]:
    """Which tokens are in the set of their row; a negative one is in none."""
    words = jnp.take_along_axis(sets, jnp.maximum(tokens, 0) // 32, axis=1)
    bits = (words >> (jnp.maximum(tokens, 0) % 32).astype(jnp.uint32)) & 1
    return (bits == 1) & (tokens >= 0)


def only_allowed(logits: Float[Array, "B N V"], allowed: UInt32[Array, "B N words"]) -> Float[Array, "B N V"]:
    """Logits that are -inf for tokens that are not allowed; this comes before all other settings.

    Args:
        logits: Of the nodes, of any floating type; a device's own part of the vocabulary, where it has one
            (see `pallas_kernels.shards`).
        allowed: Packed sets of the whole vocabulary: see `jetspec_jax.sampling.token_sets`.
    """
    size = logits.shape[-1]
    token = jnp.arange(size, dtype=jnp.int32) + size * shards.index()
    # Behind the last token of the last part are logits of padding, which are -inf.
    word = jnp.take(allowed, jnp.minimum(token // 32, allowed.shape[2] - 1), axis=2)
    bit = word >> (token % 32).astype(jnp.uint32)[None, None, :] & 1
    return jnp.where(bit == 1, logits, -jnp.inf)
