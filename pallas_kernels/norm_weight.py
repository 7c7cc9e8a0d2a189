"""How a norm's weight multiplies what was normalised: one formula for every operation with a norm."""

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
    """The end of a norm: its rows, before they are rounded to their `dtype`, times its weight.

    See `rms_norm` for what offset and scale, which are static, mean. The weight broadcasts against `y`.
    """
    if offset is None:
        wide = jnp.promote_types(dtype, weight.dtype)
        return (y.astype(wide) * weight.astype(wide)).astype(dtype)
    weight = weight.astype(jnp.float32)
    # XLA would compute a sum with zero.
    if offset != 0:
        weight = offset + weight
    if scale != 1:
        weight = scale * weight
    return (y * weight).astype(dtype)
