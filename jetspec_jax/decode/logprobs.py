"""Log-probabilities of chosen tokens, and of the likeliest ones, under the target's own distribution.

That is the softmax of its logits as they are: before masks, biases, penalties, temperature and filters.

Shapes: B slots, R rows of each, K likeliest tokens, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from jetspec_jax.sampling.params import MOST_LOGPROBS
from jetspec_jax.tree import top_candidates
from pallas_kernels import shards


class Logprobs(NamedTuple):
    """What is told of tokens; records of rounds have an axis of rounds before the others.

    Attributes:
        chosen: Log-probability of each.
        ranks: 1 for the likeliest of all; of equally likely ones the lower id comes first.
        tokens: The K likeliest there, best first.
        likeliest: Their log-probabilities.
    """

    chosen: Float32[Array, "*rounds B R"]
    ranks: Int32[Array, "*rounds B R"]
    tokens: Int32[Array, "*rounds B R K"]
    likeliest: Float32[Array, "*rounds B R K"]


def logprobs_of(logits: Float[Array, "B R V"], chosen: Int[Array, "B R"], vocab_size: int) -> Logprobs:
    """What is told of chosen tokens; of a negative one nothing that has a meaning.

    Where several devices each compute a part of the vocabulary (see `pallas_kernels.shards`), V is a device's
    own part, and all get the same bits. Who makes something of these numbers on a mesh must tie what comes
    after to ``tokens``, the last that is exchanged.

    Args:
        logits: Of any floating type; -inf beyond the vocabulary.
        chosen: Ids in the whole vocabulary.
        vocab_size: Of the whole.
    """
    values, own = logits.astype(jnp.float32), logits.shape[-1]
    token = jnp.arange(own, dtype=jnp.int32)[None, None, :] + own * shards.index()
    column = chosen - own * shards.index()
    found = jnp.take_along_axis(values, jnp.clip(column, 0, own - 1)[:, :, None], axis=2)[:, :, 0]
    total = jax.nn.logsumexp(values, axis=-1)
    if shards.count() > 1:
        found = jnp.where((column >= 0) & (column < own), found, -jnp.inf)
        of_all = shards.gather(jnp.stack([found, total]))
        found, total = jnp.max(of_all[:, 0], axis=0), jax.nn.logsumexp(of_all[:, 1], axis=0)
    level = found[:, :, None]
    above = (values > level) | ((values == level) & (token < chosen[:, :, None]))
    ranks = 1 + jnp.sum(above, axis=-1, dtype=jnp.int32)
    if shards.count() > 1:
        ranks = 1 + jnp.sum(shards.gather(ranks - 1), axis=0)
        # Never so, but XLA does not know it: the next exchange must not overtake this one.
        values = jnp.where(ranks[:, :, None] > 0, values, -jnp.inf)
    best = top_candidates(values, min(MOST_LOGPROBS, vocab_size))
    return Logprobs(found - total, ranks, best.tokens, best.log_probs)
