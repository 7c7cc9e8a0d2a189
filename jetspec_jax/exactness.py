"""Where two decodings of one request part, and how firm the choice was there.

*Lossless* means that every committed token is the choice of a target forward over exactly its prefix. A row
computed among others may round differently from one computed alone, so a near-tie can flip. The gap between
the two largest perturbed logits tells such a tie from a mistake.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.checkpoint import Target
from jetspec_jax.choice import perturb
from jetspec_jax.forward import next_token_logits
from jetspec_jax.sampling import Sampling, SamplingParams

# In float32 a difference at a larger gap than this is a mistake; below it is a tie, to be listed.
TIE_GAP = 1e-4


@dataclass(frozen=True)
class Divergence:
    """The first difference between two decodings of a request.

    Attributes:
        position: Index among the generated tokens.
        token: The token in question there; None if it ended before.
        expected: Plain decoding's token there; None if it ended before.
        gap: Between the two largest perturbed logits of plain decoding there.
    """

    position: int
    token: int | None
    expected: int | None
    gap: float

    @property
    def is_tie(self) -> bool:
        """Whether rounding in float32 explains the difference."""
        return self.gap < TIE_GAP


def first_divergence(
    target: Target,
    prompt: Sequence[int],
    params: SamplingParams,
    tokens: Sequence[int],
    expected: Sequence[int],
) -> Divergence | None:
    """The first difference between generated tokens and plain decoding's; None if they are equal.

    Args:
        target: The target.
        prompt: The request's prompt.
        params: Its settings; a sampled request needs its seed here.
        tokens: What was generated.
        expected: What plain decoding generated.
    """
    if list(tokens) == list(expected):
        return None
    both = min(len(tokens), len(expected))
    position = next((i for i in range(both) if tokens[i] != expected[i]), both)
    gap = choice_gap(target, [*prompt, *expected[:position]], params)
    return Divergence(
        position,
        tokens[position] if position < len(tokens) else None,
        expected[position] if position < len(expected) else None,
        gap,
    )


def choice_gap(target: Target, prefix: Sequence[int], params: SamplingParams) -> float:
    """Gap between the two largest perturbed logits of the token that follows ``prefix``.

    With top-k, top-p or min-p a token at the filter's edge can also come or go by rounding; the gap does not
    show that.

    Raises:
        ValueError: A sampled request has no seed, so its noise is not known.
    """
    if params.temperature > 0 and params.seed is None:
        raise ValueError("the gap of a sampled choice needs the request's seed")
    last = next_token_logits(target, prefix)
    sampling = jax.tree.map(lambda x: jnp.asarray(x)[None], Sampling.of(params))
    depth, position = jnp.zeros((1, 1), jnp.int32), jnp.array([len(prefix)], jnp.int32)
    row = np.sort(np.asarray(perturb(last, depth, position, sampling, max_depth=0))[0, 0])
    return float(row[-1] - row[-2])
