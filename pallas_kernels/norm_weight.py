"""Multiplication with a norm's weight, shared by all operations with a norm."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def weighted(
    y: Float32[Array, "..."],
    weight: Float[Array, "..."],
    dtype: jnp.dtype,
    *,
    offset: float | None,
    scale: float = 1.0,
) -> Float[Array, "..."]:
    """Normalised rows in float32 times the norm's weight, rounded to `dtype`.

    See `rms_norm` for the static offset and scale. The weight broadcasts against `y`.
    """
    if offset is None:
        wide = jnp.promote_types(dtype, weight.dtype)
        return (y.astype(wide) * weight.astype(wide)).astype(dtype)
    weight = weight.astype(jnp.float32)
    # XLA would not remove an addition of zero.
    if offset != 0:
        weight = offset + weight
    if scale != 1:
        weight = scale * weight
    return (y * weight).astype(dtype)
