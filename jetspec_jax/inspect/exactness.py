"""Where two decodings of one request part, and how firm the choice was there.

*Lossless* means that every committed token is the choice of a target forward over exactly its prefix. A row
computed among others may round differently from one computed alone, so a near-tie can flip. How far the token
is behind the best one, in perturbed logits, tells such a tie from a mistake.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.engine.admission import stop_ids_of
from jetspec_jax.engine.bad_words import encode_bad_words, endings_of
from jetspec_jax.engine.grammars import matcher_for
from jetspec_jax.inspect.forward import next_token_logits
from jetspec_jax.models import Weights
from jetspec_jax.sampling.adjust import Adjustments, adjust, room_for
from jetspec_jax.sampling.allowed import only_allowed
from jetspec_jax.sampling.choice import perturb
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.tree import NO_PARENT
from pallas_kernels.quantized import FP8

#: In float32 a difference at a larger gap than this is a mistake; below it is a tie, to be listed. Targets
#: with recurrent layers have a bound of their own at each token, `tie_gap_at`.
TIE_GAP = 1e-4
#: What reports call a tie.
TIE_RULE = (
    f"within {TIE_GAP:.0e} of the best, or behind recurrent layers within what rounding amounts to there"
)
# Random changes of the weights that a token's own bound is made of, and how many root mean squares of their
# effect it is: a normal deviate is larger once in 16,000 times.
_DRAWS, _DEVIATIONS = 8, 4


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
        tie_gap: Below this rounding in float32 explains ``behind``.
    """

    position: int
    token: int | None
    expected: int | None
    gap: float
    behind: float | None
    tie_gap: float = TIE_GAP

    @property
    def is_tie(self) -> bool:
        """Whether rounding in float32 explains the difference: both tokens were as good as the best."""
        return self.behind is not None and self.behind < self.tie_gap


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
    behind, tie_gap = None, TIE_GAP
    if token is not None and other is not None:
        lesser = min(token, other, key=lambda own: row[own])
        behind = float(row.max() - row[lesser]) if np.isfinite(row[lesser]) else None
        if behind is not None and behind >= TIE_GAP:
            tie_gap = tie_gap_at(target, prompt, expected[:position], params, int(row.argmax()), lesser)
    second, best = np.partition(row, -2)[-2:]
    return Divergence(position, token, other, float(best - second), behind, tie_gap)


def tie_gap_at(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    best: int,
    lesser: int,
) -> float:
    """How far rounding in float32 may move two tokens' perturbed logits after a prefix, at least `TIE_GAP`.

    A target without recurrent layers has `TIE_GAP`. Behind a recurrence, a norm divides what a token reads
    from the state by its length. Where the state has nearly decayed, or the query is nearly orthogonal to it,
    that length is small beside the terms that were summed, and the norm magnifies their rounding, by up to
    1 / sqrt(eps) = 1,000. No program of float32 can avoid it, and it depends on the token. So it is measured
    there. The computed product of n terms is the exact one of weights that are off by up to sqrt(n) roundings
    (Higham and Mary, SIAM J. Sci. Comput. 41, 2019): all weights are changed by that much, with random signs.

    Args:
        target: The target; only float32 is judged, so that weights of another type have `TIE_GAP`.
        prompt: The request's prompt.
        output: What was generated before.
        params: The request's settings.
        best: A token.
        lesser: Another one.
    """
    if target.dtype != jnp.float32 or not any(layer.recurrence for layer in target.config.layers):
        return TIE_GAP

    def apart(weights: Weights) -> float:
        row = perturbed_logits(replace(target, weights=weights), prompt, output, params)
        return float(row[best]) - float(row[lesser])

    size = np.float32(target.config.hidden_size**0.5 * np.finfo(np.float32).eps / 2)
    here, rng = apart(target.weights), np.random.default_rng(0)
    draws = [apart(_changed(target.weights, _signs(target.weights, rng), size)) for _ in range(_DRAWS)]
    # Where a change takes one of the two out of a filter, nothing is learnt of their distance.
    changes = [draw - here for draw in draws if np.isfinite(draw)]
    return max(TIE_GAP, _DEVIATIONS * float(np.sqrt(np.mean(np.square(changes))))) if changes else TIE_GAP


def _signs(weights: Weights, rng: np.random.Generator) -> Any:
    """Random signs along each axis of each weight: an element's sign is their product."""
    return jax.tree.map(
        lambda leaf: [rng.choice(np.array([-1, 1], np.float32), size) for size in leaf.shape], weights
    )


@jax.jit
def _changed(weights: Weights, signs: Any, size: Float32[Array, ""]) -> Weights:
    """Weights that are each larger or smaller by a factor of 1 + size, as their signs say."""

    def change(leaf: Array, signs: Sequence[Array]) -> Array:
        if leaf.dtype == FP8:  # whose scales are changed
            return leaf
        axes = range(leaf.ndim)
        own = (jnp.expand_dims(sign, [*axes[:axis], *axes[axis + 1 :]]) for axis, sign in enumerate(signs))
        return leaf * (1 + size * math.prod(own, start=jnp.ones(())))

    return jax.tree.map(change, weights, signs)


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
