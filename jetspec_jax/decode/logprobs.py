"""Log-probabilities of chosen and most likely tokens under the target's distribution.

This is the softmax of the unmodified logits, before masks, biases, penalties, temperature and filters.

Shapes: B slots, R rows of each, K most likely tokens, V vocabulary.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from jetspec_jax.sampling.params import MOST_LOGPROBS
from jetspec_jax.tree import top_candidates
from pallas_kernels import shards


class Logprobs(NamedTuple):
    """Log-probabilities of tokens; in records there is a leading axis of rounds.

    Attributes:
        chosen: Log-probabilities of the chosen tokens.
        ranks: Ranks of the chosen tokens, from 1; among equals the lower id is first.
        tokens: The K most likely tokens, best first.
        likeliest: Their log-probabilities.
    """

    chosen: Float32[Array, "*rounds B R"]
    ranks: Int32[Array, "*rounds B R"]
    tokens: Int32[Array, "*rounds B R K"]
    likeliest: Float32[Array, "*rounds B R K"]


def logprobs_of(logits: Float[Array, "B R V"], chosen: Int[Array, "B R"], vocab_size: int) -> Logprobs:
    """Log-probabilities of chosen tokens; arbitrary for negative ids.

    If the vocabulary is sharded over devices (see `pallas_kernels.shards`), V is the size of a shard, and all
    devices get the same bits. On a mesh, later collectives must depend on ``tokens``, the result of the last
    collective here.

    Padding has logits of -inf. Ids are those of the whole vocabulary of ``vocab_size`` tokens.
    """
    values, local = logits.astype(jnp.float32), logits.shape[-1]
    token = jnp.arange(local, dtype=jnp.int32)[None, None, :] + local * shards.index()
    column = chosen - local * shards.index()
    found = jnp.take_along_axis(values, jnp.clip(column, 0, local - 1)[:, :, None], axis=2)[:, :, 0]
    total = jax.nn.logsumexp(values, axis=-1)
    if shards.count() > 1:
        found = jnp.where((column >= 0) & (column < local), found, -jnp.inf)
        of_all = shards.gather(jnp.stack([found, total]))
        found, total = jnp.max(of_all[:, 0], axis=0), jax.nn.logsumexp(of_all[:, 1], axis=0)
    level = found[:, :, None]
    above = (values > level) | ((values == level) & (token < chosen[:, :, None]))
    ranks = 1 + jnp.sum(above, axis=-1, dtype=jnp.int32)
    if shards.count() > 1:
        ranks = 1 + jnp.sum(shards.gather(ranks - 1), axis=0)
        # The condition is always true, but orders the next collective after this one.
        values = jnp.where(ranks[:, :, None] > 0, values, -jnp.inf)
    best = top_candidates(values, min(MOST_LOGPROBS, vocab_size))
    return Logprobs(found - total, ranks, best.tokens, best.log_probs)
