"""The draft distribution, reduced to the tokens that a tree looks at. Shapes: K candidates of a row."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import shards

# XLA:GPU has a kernel for the top 16 of rows from this size on; shorter ones it sorts.
_LEAST_CHUNK = 1024


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Candidates:
    """The K best tokens of every draft row; row d (0-based) drafts the tokens at depth d + 1.

    Attributes:
        tokens: token ids, best first, the lower id first among equals.
        log_probs: their log-probabilities over the full vocabulary.
        entropies: of the whole rows, in nats.
        pairs: log-probabilities of every candidate below every candidate of the row above, from a drafter
            that knows a node's parent: ``[b, d, u, t]`` is token t below parent u. All parents of the first
            row are the anchor. None where all nodes of a depth share a row.
    """

    tokens: Int32[Array, "B D K"]
    log_probs: Float32[Array, "B D K"]
    entropies: Float32[Array, "B D"]
    pairs: Float32[Array, "B D K K"] | None = None

    def best(self, count: int) -> "Candidates":
        """The best ``count`` of every row, without pairs: as a plan sees them."""
        return Candidates(self.tokens[:, :, :count], self.log_probs[:, :, :count], self.entropies)


def top_candidates(draft_logits: Float[Array, "B D V"], count: int) -> Candidates:
    """The top `count` tokens of each row with their full-vocabulary log-probabilities.

    `count` is static and in 1..V. Log-probabilities are float32 whatever the logits are.

    Where several devices each compute a part of the vocabulary (see `pallas_kernels.shards`), V is a device's
    own part: all are of one size, in order, and -inf after the last token. `count` is in 1..the size of the
    whole vocabulary, and all devices return the same bits.
    """
    batch, depth, vocab = draft_logits.shape
    whole, wanted = shards.count() == 1, count
    if not whole:
        count = min(wanted, vocab)
    rows = batch * depth
    # The best of every chunk, then the best of those: a draft's few rows are work for few blocks of a GPU,
    # their chunks for many. Chunks and their winners are in order, so the lower id stays first among equals.
    least = max(count, _LEAST_CHUNK)
    size = next((size for size in range(least, vocab) if vocab % size == 0), vocab)
    chunks = jnp.arange(vocab // size, dtype=jnp.int32)
    # In float32, of which there is little here: XLA:GPU sorts short rows of bfloat16.
    logits = draft_logits.astype(jnp.float32)
    top, tokens = jax.lax.top_k(logits.reshape(rows * chunks.size, size), count)
    tokens = tokens.reshape(rows, chunks.size, count) + size * chunks[None, :, None]
    top, place = jax.lax.top_k(top.reshape(rows, -1), count)
    tokens = jnp.take_along_axis(tokens.reshape(rows, -1), place, axis=1, mode="promise_in_bounds")
    # Only the winners are normalised.
    top = top.reshape(batch, depth, count)
    best = top[:, :, :1]
    if not whole:
        best = _finite(best)
    below = logits - best
    total = jnp.sum(jnp.exp(below), axis=-1, keepdims=True)
    # -inf times 0 is no number, and a token without probability adds nothing.
    moment = jnp.sum(jnp.where(below > -jnp.inf, jnp.exp(below) * below, 0.0), axis=-1, keepdims=True)
    if not whole:
        tokens = tokens.reshape(top.shape) + vocab * shards.index()
        top, tokens, total, moment = _of_all_parts(top, tokens, total, moment, wanted)
        best = top[:, :, :1]
    return Candidates(
        tokens.reshape(top.shape).astype(jnp.int32),
        top - best - jnp.log(total),
        (jnp.log(total) - moment / total)[:, :, 0],
    )


def _of_all_parts(
    top: Float32[Array, "B D own"],
    tokens: Int32[Array, "B D own"],
    total: Float32[Array, "B D 1"],
    moment: Float32[Array, "B D 1"],
    count: int,
) -> tuple[
    Float32[Array, "B D count"], Int32[Array, "B D count"], Float32[Array, "B D 1"], Float32[Array, "B D 1"]
]:
    """The same of the whole vocabulary as of this device's part, by one gather.

    Args:
        top: The best logits, best first.
        tokens: Their ids in the whole vocabulary.
        total: Sum of the exponentials of all logits less the (finite) best one.
        moment: Sum of those exponentials, each times its exponent.
        count: How many of the best are wanted; a part may have fewer.
    """
    batch, depth, own = top.shape
    numbers = jax.lax.bitcast_convert_type(jnp.concatenate([top, total, moment], axis=2), jnp.int32)
    of_all = shards.gather(jnp.concatenate([tokens, numbers], axis=2))
    tokens, numbers = of_all[..., :own], jax.lax.bitcast_convert_type(of_all[..., own:], jnp.float32)

    # In the order of the parts, so that the lower id stays first among equals.
    def side_by_side(x: Shaped[Array, "parts B D own"]) -> Shaped[Array, "B D found"]:
        return jnp.moveaxis(x, 0, 2).reshape(batch, depth, -1)

    top, place = jax.lax.top_k(side_by_side(numbers[..., :own]), count)
    tokens = jnp.take_along_axis(side_by_side(tokens), place, axis=2, mode="promise_in_bounds")
    # What each part measured from its own best, measured from the best of all.
    shift = _finite(numbers[..., :1]) - _finite(top[:, :, :1])[None]
    scale, total, moment = jnp.exp(shift), numbers[..., own : own + 1], numbers[..., own + 1 :]
    moment = jnp.sum(jnp.where(scale > 0, scale * (moment + shift * total), 0.0), axis=0)
    return top, tokens, jnp.sum(scale * total, axis=0), moment


def _finite(best: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """The best logits of parts, among them some without any token: -inf less -inf is no number."""
    return jnp.maximum(best, jnp.finfo(jnp.float32).min)
