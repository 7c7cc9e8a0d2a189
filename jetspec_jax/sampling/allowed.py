"""Packed sets of tokens on the device: see `jetspec_jax.sampling.token_sets`."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from pallas_kernels import shards


def contains(sets: UInt32[Array, "B words"], tokens: Int[Array, "B K"]) -> Bool[Array, "B K"]:
    """Whether each token is in its row's set; negative tokens are in none."""
    words = jnp.take_along_axis(sets, jnp.maximum(tokens, 0) // 32, axis=1)
    bits = (words >> (jnp.maximum(tokens, 0) % 32).astype(jnp.uint32)) & 1
    return (bits == 1) & (tokens >= 0)


def only_allowed(logits: Float[Array, "B N V"], allowed: UInt32[Array, "B N words"]) -> Float[Array, "B N V"]:
    """Sets the logits of tokens that are not allowed to -inf; applied before all other settings.

    Sets are over the whole vocabulary, logits those of this device's shard, see `pallas_kernels.shards`.
    """
    size = logits.shape[-1]
    token = jnp.arange(size, dtype=jnp.int32) + size * shards.index()
    # The last shard may end in padding, whose logits are -inf, so its index is clipped.
    word = jnp.take(allowed, jnp.minimum(token // 32, allowed.shape[2] - 1), axis=2)
    bit = word >> (token % 32).astype(jnp.uint32)[None, None, :] & 1
    return jnp.where(bit == 1, logits, -jnp.inf)
