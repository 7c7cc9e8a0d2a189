"""The types that weights have: float32 masters, and what is computed with and written."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jetspec_jax.models import Weights


def cast(weights: Weights, dtype: jnp.dtype) -> Weights:
    """Weights as a forward pass uses them; the gradient goes to what was cast."""
    return jax.tree.map(lambda w: w.astype(dtype), weights)


def whole(weights: Weights) -> Weights:
    """Weights gathered from the devices of a mesh for the products that need them; elsewhere as they are.

    Split weights meet a split batch in every product. Left to itself XLA gathers the batch, and with it
    logits of the whole vocabulary; the weights are less.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return weights
    return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, PartitionSpec()), weights)


def as_shipped(weights: Weights, dtype: jnp.dtype) -> Weights:
    """Weights as others will load them, rounded to bfloat16, in ``dtype``: what an evaluation looks at."""
    return cast(cast(weights, jnp.dtype(jnp.bfloat16)), dtype)
