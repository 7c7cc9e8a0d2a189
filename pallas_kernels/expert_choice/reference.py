"""The choice of experts in plain JAX: the specification, the test oracle and the fallback."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

# What a sum of weights is kept above, so that weights that all vanish stay zero.
TINY = 1e-20


@dataclass(frozen=True, slots=True)
class RouterRule:
    """A rule: scores of all experts, the K best of them, and weights from their scores.

    Qwen3-MoE and Gemma 4 score by softmax. GPT-OSS takes a softmax over the chosen logits alone, which is the
    same as one over all, renormalised. Step-3.7 scores by sigmoid, and chooses with a bias.

    Attributes:
        top_k: K.
        scores: "softmax" over all experts, or "sigmoid" of each.
        renormalise: Whether the weights are divided by their sum.
        scale: What all weights are multiplied with afterwards.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.top_k < 1:
            raise ValueError(f"RouterRule: top_k must be at least 1, not {self.top_k}")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"RouterRule: scores must be softmax or sigmoid, not {self.scores!r}")


class ExpertChoice(NamedTuple):
    """Of every token its experts, no two alike, and their weights."""

    experts: Int32[Array, "T K"]
    weights: Float32[Array, "T K"]


def expert_choice(
    logits: Float32[Array, "T E"],
    bias: Float[Array, "E"] | None,
    expert_scale: Float[Array, "E"] | None,
    *,
    routing: RouterRule,
) -> ExpertChoice:
    """See `api.expert_choice`, which explains the shapes and checks them."""
    # A softmax has the order of its logits, but where it rounds two of them to one number.
    scores = order = logits
    if routing.scores == "sigmoid":
        scores = jax.nn.sigmoid(logits)
        order = scores if bias is None else scores + bias.astype(jnp.float32)[None]
    _, experts = jax.lax.top_k(order, routing.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=1)
    if routing.scores == "softmax":
        top = jnp.max(logits, axis=1, keepdims=True)
        weights = jnp.exp(weights - top)
        if not routing.renormalise:
            weights /= jnp.sum(jnp.exp(logits - top), axis=1, keepdims=True)
    if routing.renormalise:
        weights /= jnp.sum(weights, axis=1, keepdims=True) + TINY
    weights *= routing.scale
    if expert_scale is not None:
        weights *= expert_scale.astype(jnp.float32)[experts]
    return ExpertChoice(experts, weights)
