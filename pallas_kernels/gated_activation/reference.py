"""The gated activation in plain JAX: the specification, the test oracle, the fallback and the derivative."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.activation import Activation


def gated_activation(
    gate_up: Float[Array, "*rows 2 F"], *, activation: Activation
) -> Float[Array, "*rows F"]:
    """See `api.gated_activation`, which explains the shapes and checks them."""
    gate, up = (gate_up[..., i, :].astype(jnp.float32) for i in (0, 1))
    return activation(gate, up).astype(gate_up.dtype)
