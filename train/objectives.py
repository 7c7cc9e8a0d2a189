"""Losses over rows of hidden states. Logits are made and dropped chunk by chunk, on the way back too.

Shapes: R rows, M model, V vocabulary. ``logits`` maps hidden rows ``[1, R, M]`` to float32 ``[1, R, V]``.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Logits = Callable[[Float[Array, "1 R M"]], Float[Array, "1 R V"]]


def next_token_loss(
    hidden: Float[Array, "R M"], labels: Int[Array, "R"], logits: Logits, *, chunk: int
) -> Float[Array, "R"]:
    """Negative log-likelihood of each label, in nats."""

    def rows(part: tuple[Array, Array]) -> Array:
        x, label = part
        log_p = jax.nn.log_softmax(logits(x[None])[0], axis=-1)
        return -jnp.take_along_axis(log_p, label[:, None], axis=1)[:, 0]

    return _by_chunks(rows, (hidden, labels), chunk)


def forward_kl(
    student: Float[Array, "R M"],
    teacher: Float[Array, "R M"],
    logits: Logits,
    *,
    temperature: float,
    chunk: int,
) -> tuple[Float[Array, "R"], Bool[Array, "R"]]:
    """``T² KL(teacher || student)`` of each row in nats, and whether both have the same likeliest token.

    Source: the JetSpec paper's distillation objective, with both sides read by the target's own output table.
    """

    def rows(part: tuple[Array, Array]) -> tuple[Array, Array]:
        own, given = (logits(x[None])[0] for x in part)
        log_q = jax.nn.log_softmax(own / temperature, axis=-1)
        log_p = jax.lax.stop_gradient(jax.nn.log_softmax(given / temperature, axis=-1))
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1) * temperature**2
        return kl, jnp.argmax(own, axis=-1) == jnp.argmax(given, axis=-1)

    return _by_chunks(rows, (student, teacher), chunk)


def depth_weights(depth: int, gamma: float) -> Float[Array, "D"]:
    """Weight of each slot after the anchor: ``exp(-k / gamma)`` for k = 1..D, all ones for gamma 0.

    Source: the decay of DFlash's training; the JetSpec paper's default is none.
    """
    k = jnp.arange(1, depth + 1, dtype=jnp.float32)
    return jnp.exp(-k / gamma) if gamma else jnp.ones_like(k)


def weighted_mean(values: Float[Array, "N D"], weights: Float[Array, "D"]) -> Float[Array, ""]:
    """Mean over rows, weighted by depth."""
    return jnp.sum(values * weights[None, :]) / (values.shape[0] * jnp.sum(weights))


def accepted_length(matches: Bool[Array, "N D"]) -> Float[Array, ""]:
    """Mean number of leading matches: what a greedy chain would have had accepted of each block."""
    return jnp.mean(jnp.sum(jnp.cumprod(matches.astype(jnp.float32), axis=-1), axis=-1))


def _by_chunks(rows: Callable[[Any], Any], arrays: tuple[Array, ...], chunk: int) -> Any:
    """Maps a function of rows over chunks of them; the backward pass computes each chunk again."""
    count = arrays[0].shape[0]
    chunk = min(chunk, count)
    whole = -(-count // chunk) * chunk

    def split(x: Array) -> Array:
        padded = jnp.pad(x, ((0, whole - count), *(((0, 0),) * (x.ndim - 1))))
        return padded.reshape(whole // chunk, chunk, *x.shape[1:])

    out = jax.lax.map(jax.checkpoint(rows), tuple(split(x) for x in arrays))
    return jax.tree.map(lambda x: x.reshape(whole, *x.shape[2:])[:count], out)
