"""The types that weights have: float32 masters, and what is computed with and written."""

import jax
import jax.numpy as jnp

from jetspec_jax.models import Weights


def cast(weights: Weights, dtype: jnp.dtype) -> Weights:
    """Weights as a forward pass uses them; the gradient goes to what was cast."""
    return jax.tree.map(lambda w: w.astype(dtype), weights)


def as_shipped(weights: Weights, dtype: jnp.dtype) -> Weights:
    """Weights as others will load them, rounded to bfloat16, in ``dtype``: what an evaluation looks at."""
    return cast(cast(weights, jnp.dtype(jnp.bfloat16)), dtype)
