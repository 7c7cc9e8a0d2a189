"""Finds the first difference between two decodings of a request, and the gap of the choice there.

*Lossless* means that every committed token is the choice of a target forward over exactly its prefix. A row
computed among others may round differently from a row computed alone, so a near-tie can flip. The distance of
the token from the best one, in perturbed logits, separates such a tie from a mistake.
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
from jetspec_jax.engine.admission import encode_bad_words, endings_of, stop_ids_of
from jetspec_jax.engine.grammars import matcher_for
from jetspec_jax.inspect.forward import next_token_logits
from jetspec_jax.models import Weights
from jetspec_jax.sampling.adjust import Adjustments, adjust
from jetspec_jax.sampling.allowed import only_allowed
from jetspec_jax.sampling.choice import perturb
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.tree import NO_PARENT
from pallas_kernels.quantized import FP8

#: In float32 a difference with a larger gap is a mistake; with a smaller gap it is a tie, and is listed. For
#: targets with recurrent layers the bound depends on the token, see `tie_gap_at`.
TIE_GAP = 1e-4
#: The definition of a tie in reports.
TIE_RULE = (
    f"within {TIE_GAP:.0e} of the best, or behind recurrent layers within what rounding amounts to there"
)
# The number of random changes of the weights for a token's bound, and the bound in root mean squares of their
# effect: a normal deviate exceeds it once in 16,000 times.
_DRAWS, _DEVIATIONS = 8, 4


@dataclass(frozen=True)
class Divergence:
    """The first difference between two decodings of a request.

    Attributes:
        position: The index among the generated tokens.
        token: The token at the position; None if the output ends before it.
        expected: Plain decoding's token; None if its output ends before the position.
        gap: The difference of plain decoding's two largest perturbed logits.
        behind: The distance of the lesser of the two tokens' perturbed logits from the largest; None if one
            is no choice, because its output ends before the position or a filter removes the token.
        tie_gap: The bound below which rounding in float32 explains ``behind``.
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
        params: The request's parameters; a sampled request needs its seed.
        tokens: The generated tokens.
        expected: Plain decoding's tokens.
    """
    if list(tokens) == list(expected):
        return None
    both = min(len(tokens), len(expected))
    position = next((i for i in range(both) if tokens[i] != expected[i]), both)
    row = perturbed_logits(target, prompt, expected[:position], params)
    token, expected_token = (
        output[position] if position < len(output) else None for output in (tokens, expected)
    )
    behind, tie_gap = None, TIE_GAP
    if token is not None and expected_token is not None:
        lesser = min(token, expected_token, key=lambda choice: row[choice])
        behind = float(row.max() - row[lesser]) if np.isfinite(row[lesser]) else None
        if behind is not None and behind >= TIE_GAP:
            tie_gap = tie_gap_at(target, prompt, expected[:position], params, int(row.argmax()), lesser)
    second, best = np.partition(row, -2)[-2:]
    return Divergence(position, token, expected_token, float(best - second), behind, tie_gap)


def tie_gap_at(
    target: Target,
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    best: int,
    lesser: int,
) -> float:
    """The bound on float32 rounding in the difference of two tokens' perturbed logits, at least `TIE_GAP`.

    Without recurrent layers the bound is `TIE_GAP`. After a recurrence a norm divides the token's output by
    its length. If the state has nearly decayed, or the query is nearly orthogonal to it, that length is small
    compared with the summed terms, and the norm magnifies their rounding by up to 1 / sqrt(eps) = 1,000. No
    float32 program can avoid this, and it depends on the token, so the bound is measured for the token. A
    computed product of n terms is the exact product of weights that are off by up to sqrt(n) roundings
    (Higham and Mary, SIAM J. Sci. Comput. 41, 2019): all weights are changed by that much, with random signs.
    """
    if target.dtype != jnp.float32 or not any(layer.recurrence for layer in target.config.layers):
        return TIE_GAP

    def apart(weights: Weights) -> float:
        row = perturbed_logits(replace(target, weights=weights), prompt, output, params)
        return float(row[best]) - float(row[lesser])

    size = np.float32(target.config.hidden_size**0.5 * np.finfo(np.float32).eps / 2)
    here, rng = apart(target.weights), np.random.default_rng(0)
    draws = [apart(_changed(target.weights, _signs(target.weights, rng), size)) for _ in range(_DRAWS)]
    # A change with which a filter removes one of the two tokens gives no distance.
    changes = [draw - here for draw in draws if np.isfinite(draw)]
    return max(TIE_GAP, _DEVIATIONS * float(np.sqrt(np.mean(np.square(changes))))) if changes else TIE_GAP


def _signs(weights: Weights, rng: np.random.Generator) -> Any:
    """Random signs along each axis of each weight: an element's sign is their product."""
    return jax.tree.map(
        lambda leaf: [rng.choice(np.array([-1, 1], np.float32), size) for size in leaf.shape], weights
    )


@jax.jit
def _changed(weights: Weights, signs: Any, size: Float32[Array, ""]) -> Weights:
    """Weights times 1 + size or 1 - size, according to the product of their signs."""

    def change(leaf: Array, signs: Sequence[Array]) -> Array:
        if leaf.dtype in (FP8, jnp.uint8):  # FP8's scales are changed instead; MXFP4 is unchanged
            return leaf
        axes = range(leaf.ndim)
        factors = (
            jnp.expand_dims(sign, [*axes[:axis], *axes[axis + 1 :]]) for axis, sign in enumerate(signs)
        )
        return leaf * (1 + size * math.prod(factors, start=jnp.ones(())))

    return jax.tree.map(change, weights, signs)


def perturbed_logits(
    target: Target, prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> Float32[np.ndarray, "V"]:
    """The adjusted, scaled, filtered and noisy logits, whose argmax is the token after prompt and output.

    With top-k, top-p or min-p rounding can also decide whether a token passes the filter. The gap between the
    two largest logits does not show this.
    """
    if params.temperature > 0 and params.seed is None:
        raise ValueError("the gap of a sampled choice needs the request's seed")
    adjustments = Adjustments.of(
        params,
        vocab_size=target.config.vocab_size,
        prompt=prompt,
        output=output,
        endings=endings_of(target, params),
        bad_words=encode_bad_words(target, params.bad_words),
    )
    sampling, batched = jax.tree.map(lambda x: np.asarray(x)[None], (Sampling.of(params), adjustments))
    position = np.array([len(prompt) + len(output)], np.int32)
    logits = next_token_logits(target, [*prompt, *output])
    matcher = matcher_for(target, params, stop_ids_of(target, params))
    if matcher is not None:
        matcher.advance(output)
        root = matcher.masks_of_tree(np.zeros(1, np.int32), np.full(1, NO_PARENT, np.int32), 1)
        logits = only_allowed(logits, jnp.asarray(root[None]))
    return np.asarray(_perturbed(logits, position, sampling, batched))[0, 0]


@jax.jit
def _perturbed(
    logits: Float[Array, "1 1 V"], position: Int[Array, "1"], sampling: Sampling, adjustments: Adjustments
) -> Float32[Array, "1 1 V"]:
    """One program for all prefixes and settings, of which there may be thousands."""
    depths = jnp.zeros((1, 1), jnp.int32)
    adjusted = adjust(logits, jnp.zeros((1, 1, 0), jnp.int32), depths, adjustments)
    return perturb(adjusted, depths, position, sampling, max_depth=0)
