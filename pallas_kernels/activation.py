"""The activation of gated feed-forward blocks: one formula with the families' constants."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def swish(gate: Float[Array, "*rows"], argument: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """`gate * sigmoid(argument)`, with derivatives that are finite everywhere."""
    return gate * jax.nn.sigmoid(argument)


def kernel_swish(gate: Float[Array, "*rows"], argument: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """`swish` in base two, which is what the hardware computes: a kernel is a fifth shorter than with exp."""
    return gate / (1 + jnp.exp2(argument * -math.log2(math.e)))


@dataclass(frozen=True, slots=True)
class Activation:
    """`gate * sigmoid(slope * (gate + cubic * gate³)) * (up + shift)`, with bounds.

    SiLU is slope 1. GELU in its tanh form is the cubic: (1 + tanh z) / 2 = sigmoid(2z). (Gated blocks:
    Shazeer, arXiv 2002.05202.)

    Attributes:
        slope: Factor of the sigmoid's argument.
        cubic: Factor of the gate's third power in that argument.
        limit: Upper bound of the gate, and bound of the other half's magnitude; None bounds nothing.
        limits: Where the gate is bounded: before the sigmoid ("gate") or after it ("swish").
        shift: Added to the other half after its bound.
    """

    slope: float = 1.0
    cubic: float = 0.0
    limit: float | None = None
    limits: Literal["gate", "swish"] = "gate"
    shift: float = 0.0

    def __post_init__(self) -> None:
        if self.limits not in ("gate", "swish"):
            raise ValueError(f"Activation: limits must be gate or swish, not {self.limits!r}")

    @classmethod
    def gpt_oss(cls, limit: float = 7.0, alpha: float = 1.702) -> "Activation":
        """GPT-OSS: `g * sigmoid(alpha * g) * (u + 1)` of the bounded `g` and `u`."""
        return cls(slope=alpha, limit=limit, shift=1.0)

    @classmethod
    def step(cls, limit: float) -> "Activation":
        """Step-3.7 in the layers that have a limit: `min(silu(g), limit)` times the bounded `u`."""
        return cls(limit=limit, limits="swish")

    def __call__(
        self,
        gate: Float[Array, "*rows"],
        up: Float[Array, "*rows"],
        *,
        swish: Callable[[Array, Array], Array] = swish,
    ) -> Float[Array, "*rows"]:
        """The hidden features of the halves, in their dtype, float32; kernels pass `kernel_swish`."""
        if self.limit is not None:
            up = jnp.minimum(jnp.maximum(up, -self.limit), self.limit)
            if self.limits == "gate":
                gate = jnp.minimum(gate, self.limit)
        argument = gate if self.cubic == 0 else gate * (1 + self.cubic * (gate * gate))
        gate = swish(gate, argument if self.slope == 1 else self.slope * argument)
        if self.limit is not None and self.limits == "swish":
            gate = jnp.minimum(gate, self.limit)
        return gate * (up if self.shift == 0 else up + self.shift)


SILU = Activation()
GELU_TANH = Activation(slope=math.sqrt(8 / math.pi), cubic=0.044715)
