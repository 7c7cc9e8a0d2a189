"""Scores of draft rows: the probability that a token is the target's choice, given the request and its noise.

The target's token at a position is the argmax of ``logits + T * G`` over the tokens that the filters keep.
The Gumbel noise ``G`` depends on the request's seed and the position alone, so a draft knows it::

    score(x) = log softmax_x((l(x) + s(u, x) + T * G_d(x)) / b_d)

Here l are the draft row's logits, adjusted as the target's would be, s is the score of a selector given the
parent u, and b_d is the scale of the head's errors at depth d. If the errors ``l_target - l - s`` are Gumbel
noise of scale b_d, this is the probability that x is the target's choice. At temperature 0 the noise
vanishes.

A draft never changes a choice, so what it leaves out costs acceptance, not exactness. Adjustments count the
committed tokens only, and grammars are left out. So are top-k, top-p and min-p: a row drops other tokens than
the target, and with top-p 0.9 the demo pair then commits 4 % fewer tokens a round.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from jetspec_jax.sampling.adjust import Adjustments, adjust


class DraftScoring(NamedTuple):
    """The settings and noise by which draft rows are scored.

    Attributes:
        temperature: The temperature of each slot; 0 is greedy.
        noise: Gumbel noise of the token that each row drafts; see `gumbel_noise`.
        adjust: Logit adjustments of the slots; None if there are none.
        scales: b_d of each slot and row; None means 1.
    """

    temperature: Float[Array, "B"]
    noise: Float32[Array, "B D V"]
    adjust: Adjustments | None = None
    scales: Float32[Array, "B D"] | None = None

    def adjusted(self, logits: Float[Array, "B D V"]) -> Float[Array, "B D V"]:
        """l: the logits of draft rows after adjustments."""
        if self.adjust is None:
            return logits
        batch, rows = logits.shape[:2]
        paths = jnp.zeros((batch, rows, 0), jnp.int32)
        depths = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32), (batch, rows))
        return adjust(logits, paths, depths, self.adjust)

    def perturbed(self, adjusted: Float[Array, "B D V"]) -> Float32[Array, "B D V"]:
        """The score of every token but for the selector's and the normaliser: ``(l + T * G) / b_d``."""
        temperature = self.temperature[:, None, None]
        # -0 added to a logit changes no bit.
        noise = jnp.where(temperature > 0, temperature * self.noise, -0.0)
        return self.scaled(adjusted.astype(jnp.float32) + noise)

    def scaled(self, values: Num[Array, "B D *rest"]) -> Num[Array, "B D *rest"]:
        """Values of each row over b_d."""
        if self.scales is None:
            return values
        return values / self.scales.reshape(*values.shape[:2], *[1] * (values.ndim - 2))
