"""The draft distribution, reduced to its best tokens. Shapes: K candidates of a row."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, Shaped

from pallas_kernels import shards


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Candidates:
    """The K best tokens of every draft row; row d (0-based) drafts the tokens at depth d + 1.

    Attributes:
        tokens: token ids, best first, the lower id first among equals.
        log_probs: the log-probability that each is the target's choice, over the full vocabulary.
        entropies: entropies of the whole rows, in nats.
        pairs: log-probabilities given the parent, from a head with a selector: ``[b, d, u, t]`` is candidate
            t of row d below candidate u of the row above. In the first row all parents are the anchor. None
            if all nodes of a depth share a row.
        draft_log_probs: as ``log_probs``, under the draft alone, without the noise of a sample and scales.
        draft_pairs: as ``pairs``, likewise.
        nan: whether a sequence has a row with a NaN, whose log-probabilities are -inf; None if not known.
    """

    tokens: Int32[Array, "B D K"]
    log_probs: Float32[Array, "B D K"]
    entropies: Float32[Array, "B D"]
    pairs: Float32[Array, "B D K K"] | None = None
    draft_log_probs: Float32[Array, "B D K"] | None = None
    draft_pairs: Float32[Array, "B D K K"] | None = None
    nan: Bool[Array, "B"] | None = None

    def best(self, count: int) -> "Candidates":
        """The best ``count`` of every row, without pairs, as the input of a plan."""
        drafted = None if self.draft_log_probs is None else self.draft_log_probs[:, :, :count]
        tokens, log_probs = self.tokens[:, :, :count], self.log_probs[:, :, :count]
        return Candidates(tokens, log_probs, self.entropies, draft_log_probs=drafted, nan=self.nan)


def top_candidates(
    draft_logits: Float[Array, "B D V"], count: int, scores: Float32[Array, "B D V"] | None = None
) -> Candidates:
    """The top `count` tokens of each row with their full-vocabulary log-probabilities.

    `count` is static and in 1..V. Log-probabilities are float32 for logits of any type. Tokens are ranked by
    `scores`, which need not be normalised; None means the logits.

    If the vocabulary is sharded over devices (see `pallas_kernels.shards`), V is the size of a shard. Shards
    have equal sizes and are in order, with -inf as padding. `count` is then in 1..the size of the whole
    vocabulary, and all devices return the same bits.
    """
    batch, depth, vocab = draft_logits.shape
    whole, total_count = shards.count() == 1, count
    if not whole:
        count = min(total_count, vocab)
    rows = batch * depth
    logits = draft_logits.astype(jnp.float32)
    ranked = logits if scores is None else scores
    # The best tokens lie in the groups with the largest maxima. So only the maxima, and the tokens of those
    # groups, are sorted. Groups and their tokens are in order: among equals the lower id stays first.
    divisors = (size for size in range(1, vocab // count + 1) if vocab % size == 0)
    size = min(divisors, key=lambda size: vocab // size + count * size)
    groups = ranked.reshape(rows, vocab // size, size)
    _, chosen = jax.lax.top_k(jnp.max(groups, axis=2), count)
    chosen = jnp.sort(chosen, axis=1)
    found = jnp.take_along_axis(groups, chosen[:, :, None], axis=1, mode="promise_in_bounds")
    top, place = jax.lax.top_k(found.reshape(rows, -1), count)
    group = jnp.take_along_axis(chosen, place // size, axis=1, mode="promise_in_bounds")
    tokens = size * group + place % size
    # Only the winners are normalised.
    top, tokens = (found.reshape(batch, depth, count) for found in (top, tokens))
    best = _finite(top[:, :, :1])
    # XLA may compute scores anew for each reader, and round them otherwise. None is above the best, which
    # alone makes the sum 1.
    below = jnp.minimum(ranked - best, 0.0)
    total = jnp.sum(jnp.exp(below), axis=-1, keepdims=True)
    total = jnp.maximum(total, jnp.where(top[:, :, :1] > -jnp.inf, 1.0, 0.0))
    # Tokens of probability zero add nothing; -inf times 0 would be NaN.
    moment = jnp.sum(jnp.where(below > -jnp.inf, jnp.exp(below) * below, 0.0), axis=-1, keepdims=True)
    drafted = jnp.take_along_axis(logits, tokens, axis=2, mode="promise_in_bounds")
    drafted_total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    if not whole:
        tokens = tokens + vocab * shards.index()
        sums = jnp.concatenate([total, moment, drafted_total], axis=2)
        tokens, top, drafted, sums = _of_all_parts(tokens, top, drafted, sums, total_count)
        best = _finite(top[:, :, :1])
        total, moment, drafted_total = jnp.split(sums, 3, axis=2)
    return Candidates(
        tokens.astype(jnp.int32),
        jnp.where((top > -jnp.inf) & ~jnp.isnan(total), top - best - jnp.log(total), -jnp.inf),
        jnp.where(total > 0, jnp.log(total) - moment / total, 0.0)[:, :, 0],
        draft_log_probs=jnp.where(drafted > -jnp.inf, drafted - drafted_total, -jnp.inf),
        nan=jnp.isnan(total).any(axis=(1, 2)),
    )


def _of_all_parts(
    tokens: Int32[Array, "B D local"],
    top: Float32[Array, "B D local"],
    drafted: Float32[Array, "B D local"],
    sums: Float32[Array, "B D 3"],
    count: int,
) -> tuple[
    Int32[Array, "B D count"],
    Float32[Array, "B D count"],
    Float32[Array, "B D count"],
    Float32[Array, "B D 3"],
]:
    """Combines the results of all shards of the vocabulary with one gather.

    ``tokens`` are ids in the whole vocabulary, best first. ``sums`` are those over the shard of exp(score -
    best) and of (score - best) exp(score - best), with a finite best, and the logits' logsumexp. A shard may
    have fewer than ``count`` candidates.
    """
    batch, depth, local = top.shape
    numbers = jax.lax.bitcast_convert_type(jnp.concatenate([top, drafted, sums], axis=2), jnp.int32)
    of_all = shards.gather(jnp.concatenate([tokens, numbers], axis=2))
    tokens, numbers = of_all[..., :local], jax.lax.bitcast_convert_type(of_all[..., local:], jnp.float32)
    tops, drafted, sums = jnp.split(numbers, [local, 2 * local], axis=-1)

    # In the order of the shards, so that among equals the lower id stays first.
    def side_by_side(x: Shaped[Array, "parts B D local"]) -> Shaped[Array, "B D found"]:
        return jnp.moveaxis(x, 0, 2).reshape(batch, depth, -1)

    top, place = jax.lax.top_k(side_by_side(tops), count)
    tokens, drafted = (
        jnp.take_along_axis(side_by_side(x), place, axis=2, mode="promise_in_bounds")
        for x in (tokens, drafted)
    )
    # Rescales each shard's sums from its best score to the best of all shards.
    shift = _finite(tops[..., :1]) - _finite(top[:, :, :1])[None]
    scale, (total, moment, drafted_total) = jnp.exp(shift), jnp.split(sums, 3, axis=-1)
    moment = jnp.sum(jnp.where(scale > 0, scale * (moment + shift * total), 0.0), axis=0)
    of_scores = jnp.sum(scale * total, axis=0), moment
    return (
        tokens,
        top,
        drafted,
        jnp.concatenate([*of_scores, jax.nn.logsumexp(drafted_total, axis=0)], axis=2),
    )


def _finite(best: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Best logits made finite: a shard without tokens has -inf, and -inf minus -inf would be NaN."""
    return jnp.maximum(best, jnp.finfo(jnp.float32).min)
