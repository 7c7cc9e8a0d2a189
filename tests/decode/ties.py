"""What the target's choices are the argmax of, from one plain forward over the whole sequence.

A row computed among others may round differently from one computed alone, so two tokens that nearly tie may
trade places. Such a difference is a *listed tie*, and only below `TIE`; any other difference is an error.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax import logits
from jetspec_jax.engine.admission import encode_bad_words, endings_of
from jetspec_jax.inspect.exactness import TIE_GAP
from jetspec_jax.sampling.choice import perturb
from jetspec_jax.sampling.slots import Sampling
from tests.sampling.reference import adjusted

TIE = TIE_GAP


def choice_rows(target, prompt, tokens, params, *, length=256):
    """The perturbed logits ``[T, V]`` behind each token: adjusted and filtered logits / T plus its noise.

    Nothing here is incremental: no stores, no pages, no tree. Sequences are padded to ``length`` so that one
    program serves all; causality keeps the padding out of the rows.
    """
    sequence = [*prompt, *tokens]
    rows = np.array(logits(target, [[*sequence, *[0] * (length - len(sequence))]]))
    if params.adjusts:
        wanted = {
            "endings": endings_of(target, params),
            "bad_words": encode_bad_words(target, params.bad_words),
        }
        for number in range(len(tokens)):
            at = len(prompt) - 1 + number
            rows[0, at] = adjusted(rows[0, at], params, prompt, tokens[:number], **wanted)
    own = jax.tree.map(lambda x: x[None], Sampling.of(params))
    rows = _perturb(rows, own)
    return np.asarray(rows)[0, len(prompt) - 1 : len(sequence) - 1]


@jax.jit
def _perturb(rows, own):
    length = rows.shape[1]
    # Row t emits the token at position t + 1.
    depths = jnp.arange(length, dtype=jnp.int32)[None, :]
    return perturb(rows, depths, jnp.ones(1, jnp.int32), own, max_depth=length - 1)


def gaps(rows):
    """Top-2 gap of each row; infinite where the filters leave one token."""
    top = np.sort(rows, axis=-1)[:, -2:]
    return top[:, 1] - top[:, 0]


def first_difference(expected, got):
    """Index of the first token that differs, or None."""
    for i in range(max(len(expected), len(got))):
        if expected[i : i + 1] != got[i : i + 1]:
            return i
    return None


def gap_of_difference(target, prompt, expected, got, params):
    """Top-2 gap at the first token that differs between two outputs of a request."""
    i = first_difference(expected, got)
    tokens = expected if i < len(expected) else got
    return float(gaps(choice_rows(target, prompt, tokens[: i + 1], params))[i])
