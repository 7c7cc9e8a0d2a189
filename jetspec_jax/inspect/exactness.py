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
from jaxtyping import Array, Float, Float32, Int

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.engine.bad_words import encode_bad_words, endings_of
from jetspec_jax.engine.grammars import matcher_for
from jetspec_jax.engine.planning import stop_ids_of
from jetspec_jax.inspect.forward import next_token_logits
from jetspec_jax.sampling.adjust import Adjustments, adjust, room_for
from jetspec_jax.sampling.allowed import only_allowed
from jetspec_jax.sampling.choice import perturb
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.tree import NO_PARENT

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
        behind: How far the lesser of the two tokens' perturbed logits is below the largest; None if one of
            them is no choice at all, because its output ended before or a filter takes it out.
    """

    position: int
    token: int | None
    expected: int | None
    gap: float
    behind: float | None

    @property
    def is_tie(self) -> bool:
        """Whether rounding in float32 explains the difference: both tokens were as good as the best."""
        return self.behind is not None and self.behind < TIE_GAP


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
    row = perturbed_logits(target, prompt, expected[:position], params)
    token, other = (own[position] if position < len(own) else None for own in (tokens, expected))
    behind = None
    if token is not None and other is not None:
        lesser = min(row[token], row[other])
        behind = float(row.max() - lesser) if np.isfinite(lesser) else None
    second, best = np.partition(row, -2)[-2:]
    return Divergence(position, token, other, float(best - second), behind)


def perturbed_logits(
    target: Target, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Float32[np.ndarray, "V"]:
    """What the token after prompt and output is the argmax of: adjusted, scaled, filtered and noisy logits.

    With top-k, top-p or min-p a token at the filter's edge can also come or go by rounding, which the gap
    between the two largest does not show.

    Raises:
        ValueError: A sampled request has no seed, so its noise is not known.
    """
    if params.temperature > 0 and params.seed is None:
        raise ValueError("the gap of a sampled choice needs the request's seed")
    words = encode_bad_words(target, params.bad_words)
    adjustments = Adjustments.of(
        params,
        vocab_size=target.config.vocab_size,
        prompt=prompt,
        output=output,
        endings=endings_of(target, params),
        bad_words=words,
        words=room_for(words),
    )
    sampling, own = jax.tree.map(lambda x: np.asarray(x)[None], (Sampling.of(params), adjustments))
    position = np.array([len(prompt) + len(output)], np.int32)
    logits = next_token_logits(target, [*prompt, *output])
    matcher = matcher_for(target, params, stop_ids_of(target, params))
    if matcher is not None:
        matcher.advance(output)
        root = matcher.masks_of_tree(np.zeros(1, np.int32), np.full(1, NO_PARENT, np.int32), 1)
        logits = only_allowed(logits, jnp.asarray(root[None]))
    return np.asarray(_perturbed(logits, position, sampling, own))[0, 0]


@jax.jit
def _perturbed(
    logits: Float[Array, "1 1 V"], position: Int[Array, "1"], sampling: Sampling, own: Adjustments
) -> Float32[Array, "1 1 V"]:
    """One program for all prefixes and settings: there may be thousands to look at."""
    depths = jnp.zeros((1, 1), jnp.int32)
    adjusted = adjust(logits, jnp.zeros((1, 1, 0), jnp.int32), depths, own)
    return perturb(adjusted, depths, position, sampling, max_depth=0)
