"""The draft distribution, reduced to the tokens that a tree looks at. Shapes: K candidates of a row."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

# XLA:GPU has a kernel for the top 16 of rows from this size on; shorter ones it sorts.
_LEAST_CHUNK = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Candidates:
    """The K best tokens of every draft row; row d (0-based) drafts the tokens at depth d + 1.

    Attributes:
        tokens: token ids, best first, the lower id first among equals.
        log_probs: their log-probabilities over the full vocabulary.
        entropies: of the whole rows, in nats.
    """

    tokens: Int32[Array, "B D K"]
    log_probs: Float32[Array, "B D K"]
    entropies: Float32[Array, "B D"]

    def best(self, count: int) -> "Candidates":
        """The best ``count`` of every row."""
        return Candidates(self.tokens[:, :, :count], self.log_probs[:, :, :count], self.entropies)


def top_candidates(draft_logits: Float[Array, "B D V"], count: int) -> Candidates:
    """The top `count` tokens of each row with their full-vocabulary log-probabilities.

    `count` is static and in 1..V. Log-probabilities are float32 whatever the logits are.
    """
    batch, depth, vocab = draft_logits.shape
    rows = batch * depth
    # The best of every chunk, then the best of those: a draft's few rows are work for few blocks of a GPU,
    # their chunks for many. Chunks and their winners are in order, so the lower id stays first among equals.
    least = max(count, _LEAST_CHUNK)
    size = next((size for size in range(least, vocab) if vocab % size == 0), vocab)
    chunks = jnp.arange(vocab // size, dtype=jnp.int32)
    # In float32, of which there is little here: XLA:GPU sorts short rows of bfloat16.
    logits = draft_logits.astype(jnp.float32)
    top, tokens = jax.lax.top_k(logits.reshape(rows * chunks.size, size), count)
    tokens = tokens.reshape(rows, chunks.size, count) + size * chunks[None, :, None]
    top, place = jax.lax.top_k(top.reshape(rows, -1), count)
    tokens = jnp.take_along_axis(tokens.reshape(rows, -1), place, axis=1, mode="promise_in_bounds")
    # Only the winners are normalised.
    top = top.reshape(batch, depth, count)
    best = top[:, :, :1]
    below = logits - best
    total = jnp.sum(jnp.exp(below), axis=-1, keepdims=True)
    # -inf times 0 is no number, and a token without probability adds nothing.
    moment = jnp.sum(jnp.where(below > -jnp.inf, jnp.exp(below) * below, 0.0), axis=-1, keepdims=True)
    return Candidates(
        tokens.reshape(top.shape).astype(jnp.int32),
        top - best - jnp.log(total),
        (jnp.log(total) - moment / total)[:, :, 0],
    )
