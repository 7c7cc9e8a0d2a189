"""Dtypes of weights: float32 master weights, and other dtypes for computing and saving."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jetspec_jax.models import Weights
from jetspec_jax.models.quantized import is_quantized


def cast(weights: Weights, dtype: jnp.dtype) -> Weights:
    """Weights cast to the dtype of a forward pass, with gradients for the original weights.

    Quantised weights of a frozen target and their scales are not cast.
    """
    flat = nnx.traversals.flatten_mapping(weights)
    made = {path: w if is_quantized(path) else w.astype(dtype) for path, w in flat.items()}
    return nnx.traversals.unflatten_mapping(made)


def whole(weights: Weights) -> Weights:
    """Weights gathered from the devices of a mesh; without a mesh, the weights unchanged.

    For a product of sharded weights with a sharded batch, XLA would gather the batch, and with it the logits
    of the whole vocabulary, which are larger.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return weights
    return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, PartitionSpec()), weights)


def as_shipped(weights: Weights, dtype: jnp.dtype, stored: str = "bfloat16") -> Weights:
    """Weights rounded to their stored dtype, as ``dtype``."""
    return cast(cast(weights, jnp.dtype(stored)), dtype)
