"""The SiLU gate in plain JAX: the specification, the test oracle, the fallback and the derivative.

Shapes: F features of the block.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def silu_gate(gate_up: Float[Array, "*rows 2 F"]) -> Float[Array, "*rows F"]:
    """See `api.silu_gate`, which checks the shapes."""
    gate, up = (gate_up[..., i, :].astype(jnp.float32) for i in (0, 1))
    return (jax.nn.silu(gate) * up).astype(gate_up.dtype)
