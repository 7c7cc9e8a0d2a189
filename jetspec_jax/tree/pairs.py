"""Scores of pairs, a token below its parent, as probabilities. Shapes: K candidates of a row, P parents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

# How far rounding may carry the sum of a row's probabilities above 1.
_ROUNDING = 1e-6


def pair_log_probs(
    log_probs: Float32[Array, "*R K"], scores: Float32[Array, "*R P K"], *, tail: bool
) -> Float32[Array, "*R P K"]:
    """Log-probabilities of a row's candidates below each parent.

    A candidate's log-probability plus its score, normalised: over the candidates alone, or with the ``tail``,
    which is the probability of all other tokens of the row and has the score 0. So scores of 0 change nothing
    where the tail is kept, to the bit. A pair whose score is not finite has the probability 0.

    Args:
        log_probs: The row's, over the whole vocabulary.
        scores: Of every candidate below every parent.
        tail: Whether the tail is kept.
    """
    log_probs = log_probs[..., None, :]
    possible = jnp.isfinite(scores) & (log_probs > -jnp.inf)
    scores, own = jnp.where(possible, scores, 0.0), jnp.where(possible, log_probs, 0.0)
    if tail:
        # The tail is 1 less the candidates, so the sum is 1 and what scores add to each candidate.
        most = jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), 0.0)
        unchanged = jnp.exp(-most)
        changed = jnp.where(possible, jnp.exp(scores - most), 0.0)
        probs = jnp.where(log_probs > -jnp.inf, jnp.exp(log_probs), 0.0)
        total = unchanged + jnp.sum(probs * (changed - unchanged), axis=-1, keepdims=True)
        # Where little is left, the difference is rounding; it is no less than the candidates alone.
        least = (1 - _ROUNDING) * jnp.sum(probs * changed, axis=-1, keepdims=True)
        normalised = own + (scores - most) - jnp.log(jnp.maximum(total, least))
    else:
        joint = jnp.where(possible, own + scores, -jnp.inf)
        normalised = joint - jax.nn.logsumexp(joint, axis=-1, keepdims=True)
    # Rounding must not make a child likelier than its parent.
    return jnp.where(possible, jnp.minimum(normalised, 0.0), -jnp.inf)
