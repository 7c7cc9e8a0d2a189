"""The draft distribution, reduced to what a tree of a given width can use."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Candidates:
    """The W best tokens of every draft row; row d (0-based) drafts the tokens at depth d + 1.

    Attributes:
        tokens: token ids, best first, the lower id first among equals.
        log_probs: their log-probabilities over the full vocabulary.
    """

    tokens: Int32[Array, "B D W"]
    log_probs: Float32[Array, "B D W"]


def top_candidates(draft_logits: Float[Array, "B D V"], width: int) -> Candidates:
    """The top `width` tokens of each row with their full-vocabulary log-probabilities.

    `width` is static and in 1..V. Log-probabilities are float32 whatever the logits are.
    """
    # Normalising only the winners keeps a float32 [B, D, V] out of memory.
    top, tokens = jax.lax.top_k(draft_logits, width)
    total = jax.nn.logsumexp(draft_logits.astype(jnp.float32), axis=-1, keepdims=True)
    return Candidates(tokens.astype(jnp.int32), top.astype(jnp.float32) - total)
