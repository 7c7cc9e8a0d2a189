"""Split, norm and rotary in plain JAX: specification, test oracle, fallback and derivative."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.rms_norm.reference import rms_norm


def qkv_rotary(
    qkv: Float[Array, "B N G heads E"],
    q_weight: Float[Array, "E"] | None,
    k_weight: Float[Array, "E"] | None,
    cos: Float32[Array, "B N half"],
    sin: Float32[Array, "B N half"],
    *,
    eps: float,
    weight_offset: float | None = None,
    norm_values: bool = False,
) -> tuple[Float[Array, "B N G R E"], Float[Array, "B N G E"], Float[Array, "B N G E"]]:
    """See `api.qkv_rotary`, which explains the shapes and checks them."""
    half = cos.shape[-1]

    def norm(x: Array, weight: Array | None) -> Array:
        return x if weight is None else rms_norm(x, weight, None, eps=eps, weight_offset=weight_offset)[0]

    def turn(x: Array) -> Array:
        heads = range(2, x.ndim - 1)
        c, s = jnp.expand_dims(cos, heads), jnp.expand_dims(sin, heads)
        a, b, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
        return jnp.concatenate([a * c - b * s, b * c + a * s, rest], axis=-1).astype(x.dtype)

    q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
    if norm_values:
        v = rms_norm(v, jnp.ones_like(v, shape=v.shape[-1:]), None, eps=eps)[0]
    return turn(norm(q, q_weight)), turn(norm(k, k_weight)), v
