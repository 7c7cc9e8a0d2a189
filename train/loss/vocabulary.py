"""Reductions over a vocabulary that may be sharded over devices (see `pallas_kernels.shards`).

For unsharded logits they are JAX's functions. Shards have equal sizes and are in order; logits of the padding
after the last token are -inf. All devices get the same results, and exchange only a few numbers per row.
Shapes: B sequences, N rows, V vocabulary or a shard of it.

JAX differentiates each device's copy of a result separately: a gradient is that of the sum of all copies, by
the device's local logits.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import shards


def total(values: Float[Array, "B N V"]) -> Float[Array, "B N"]:
    """The sum of each row."""
    return shards.all_sum(jnp.sum(values, axis=-1))


def log_softmax(logits: Float[Array, "B N V"]) -> Float[Array, "B N V"]:
    """Log-probabilities; 0 for padding, so that padding adds nothing to a divergence."""
    if shards.count() == 1:
        return jax.nn.log_softmax(logits, axis=-1)
    top = jnp.max(shards.gather(jnp.max(jax.lax.stop_gradient(logits), axis=-1)), axis=0)
    shifted = logits - top[:, :, None]
    log_p = shifted - jnp.log(total(jnp.exp(shifted)))[:, :, None]
    return jnp.where(logits > -jnp.inf, log_p, 0.0)


def likeliest(logits: Float[Array, "B N V"]) -> Int[Array, "B N"]:
    """The token of the highest logit, of equal ones the lowest id."""
    token = jnp.argmax(logits, axis=-1)
    if shards.count() == 1:
        return token
    token += shards.index() * logits.shape[-1]
    values, tokens = (shards.gather(x) for x in (jnp.max(logits, axis=-1), token))
    part = jnp.argmax(values, axis=0)
    return jnp.take_along_axis(tokens, part[None], axis=0)[0]


def at(values: Float[Array, "B N V"], tokens: Int[Array, "B N"]) -> Float[Array, "B N"]:
    """The value of one token of each row."""
    if shards.count() == 1:
        return jnp.take_along_axis(values, tokens[:, :, None], axis=2)[:, :, 0]
    local = tokens - shards.index() * values.shape[-1]
    there = (local >= 0) & (local < values.shape[-1])
    found = jnp.take_along_axis(values, jnp.where(there, local, 0)[:, :, None], axis=2)[:, :, 0]
    return shards.all_sum(jnp.where(there, found, 0.0))
