"""Masks that come from the host, as those of grammars: the tokens that may follow each node of a tree."""

import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from pallas_kernels import shards


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
