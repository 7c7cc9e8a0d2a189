"""Dtypes of weights: masters are float32, computing and saving use others."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jetspec_jax.models import Weights
from jetspec_jax.models.quantized import is_quantized


def cast(weights: Weights, dtype: jnp.dtype) -> Weights:
    """Weights as a forward pass uses them; the gradient goes to what was cast.

    What is quantised of a frozen target stays so, and so do its scales.
    """
    flat = nnx.traversals.flatten_mapping(weights)
    made = {path: w if is_quantized(path) else w.astype(dtype) for path, w in flat.items()}
    return nnx.traversals.unflatten_mapping(made)


def whole(weights: Weights) -> Weights:
    """Weights gathered from the devices of a mesh; without a mesh they are returned as they are.

    For products of split weights and a split batch XLA would gather the batch, and with it logits of the
    whole vocabulary, which are larger.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return weights
    return jax.tree.map(lambda w: jax.lax.with_sharding_constraint(w, PartitionSpec()), weights)


def as_shipped(weights: Weights, dtype: jnp.dtype, stored: str = "bfloat16") -> Weights:
    """Weights rounded to the type that they are saved in, in ``dtype``."""
    return cast(cast(weights, jnp.dtype(stored)), dtype)
