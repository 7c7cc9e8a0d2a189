"""The sampling parameters of all slots as arrays. Shapes: B slots."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jetspec_jax.sampling.params import SamplingParams, draw_seed


class Sampling(NamedTuple):
    """The sampling settings of B slots as arrays.

    Attributes:
        temperature: 0 is greedy.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
        min_p: 0 keeps all.
        key: Raw threefry key of the slot's seed.
    """

    temperature: Float[Array, "B"]
    top_k: Int[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    key: UInt32[Array, "B 2"]

    @classmethod
    def greedy(cls, slots: int) -> "Sampling":
        """The settings of unused slots."""
        settings = cls.of(SamplingParams(seed=0))
        return cls(*(jnp.broadcast_to(value, (slots, *value.shape)) for value in settings))

    @classmethod
    def of(cls, params: SamplingParams) -> "Sampling":
        """One request's settings as NumPy values without the slot axis; draws a seed if it is None."""
        seed = draw_seed() if params.seed is None else int(params.seed)
        fields: Any = (
            np.float32(params.temperature),
            # A vocabulary has fewer than 2**31 entries, so such a top_k keeps all.
            np.int32(0 if params.top_k is None else min(params.top_k, 2**31 - 1)),
            np.float32(1.0 if params.top_p is None else params.top_p),
            np.float32(0.0 if params.min_p is None else params.min_p),
            # The lowest 64 bits in two's complement, because seeds may be negative.
            np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
        )
        return cls(*fields)
