"""RMS norm in plain JAX: the specification, the test oracle, the fallback and the derivative."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.norm_weight import weighted


def rms_norm(
    x: Float[Array, "*rows M"],
    weight: Float[Array, "M"],
    delta: Float[Array, "*rows M"] | None,
    *,
    eps: float,
    weight_offset: float | None = None,
    weight_scale: float = 1.0,
) -> tuple[Float[Array, "*rows M"], Float[Array, "*rows M"]]:
    """See `api.rms_norm`, which explains the shapes and checks them."""
    total = x if delta is None else x + delta
    y = total.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    weight = jnp.expand_dims(weight, range(x.ndim - 1))
    return weighted(y, weight, x.dtype, offset=weight_offset, scale=weight_scale), total
