"""Probabilities of candidates given their parents. Shapes: K candidates of a row, P parents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

# The most by which rounding lets the sum of a row's probabilities exceed 1.
_ROUNDING = 1e-6


def pair_log_probs(
    log_probs: Float32[Array, "*R K"], scores: Float32[Array, "*R P K"], *, tail: bool
) -> Float32[Array, "*R P K"]:
    """Log-probabilities of a row's candidates given each parent.

    The log-probability plus the score is normalised over the candidates, or with ``tail`` over the candidates
    and the rest of the row, whose score is 0. With the tail, scores of 0 change nothing, to the bit. A pair
    whose score is not finite has probability 0.

    Args:
        log_probs: The candidates' log-probabilities over the whole vocabulary.
        scores: The score of each candidate given each parent.
        tail: Whether the probability of the row's other tokens counts.
    """
    log_probs = log_probs[..., None, :]
    possible = jnp.isfinite(scores) & (log_probs > -jnp.inf)
    scores, base = jnp.where(possible, scores, 0.0), jnp.where(possible, log_probs, 0.0)
    if tail:
        # The tail has probability 1 - sum(probs), so the sum is 1 plus the changes due to the scores.
        most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), 0.0)
        unchanged = jnp.exp(-most)
        changed = jnp.where(possible, jnp.exp(scores - most), 0.0)
        probs = jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs), 0.0)
        total = unchanged + jnp.sum(probs * (changed - unchanged), axis=-1, keepdims=True)
        # If the tail is tiny, the difference is rounding error; the sum is at least that of the candidates.
        least = (1 - _ROUNDING) * jnp.sum(probs * changed, axis=-1, keepdims=True)
        normalised = base + (scores - most) - jnp.log(jnp.maximum(total, least))
    else:
        joint = jnp.where(possible, base + scores, -jnp.inf)
        normalised = joint - jax.nn.logsumexp(joint, axis=-1, keepdims=True)
    # Rounding must not make a child more probable than its parent.
    return jnp.where(possible, jnp.minimum(normalised, 0.0), -jnp.inf)
