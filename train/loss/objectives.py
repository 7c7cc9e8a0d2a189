"""Training losses of a draft head's or target's rows, and their means.

Logits are the largest arrays of training, so they are computed and dropped chunk by chunk. ``logits`` maps
hidden rows ``[B, N, M]`` to ``[B, N, V]``. Shapes: B sequences, T tokens, N draft rows of a sequence, D draft
depth, M model, V vocabulary or a shard of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jetspec_jax.models import Weights
from pallas_kernels import shards
from train.loss import vocabulary

Logits = Callable[[Float[Array, "B N M"]], Float[Array, "B N V"]]

#: Forward KL to the target, reverse KL, the negative log-likelihood of the text's next token, the total
#: variation from the target, or the negative log-likelihood with the weights of `pace_weights`.
LossName = Literal["forward_kl", "reverse_kl", "sft", "total_variation", "dpace"]
LOSSES: tuple[str, ...] = get_args(LossName)
#: Losses that read the text's tokens alone, and not the target's probabilities.
HARD_LABELS = frozenset({"sft", "dpace"})


class Mean(NamedTuple):
    """A weighted mean as total and weight; adding the means of two parts gives the mean of both."""

    total: Float[Array, "*s"]
    weight: Float[Array, "*s"]

    def value(self) -> Float[Array, "*s"]:
        """The mean; 0 if the weight is 0."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1.0)


class Count(NamedTuple):
    """A count over a batch; counts of its parts add up."""

    total: Int[Array, ""]

    def value(self) -> Int[Array, ""]:
        """The number."""
        return self.total


#: Means and counts by name; training minimises "loss".
Means = dict[str, Any]
#: A loss of weights, with frozen arrays, on a batch with a key; its other means are logged.
Loss = Callable[[Weights, Any, Any, Key[Array, ""]], Means]
#: The target's output projection, which may be sharded: applies a function of the target's `Logits`, the
#: head's `Logits`, and arrays with a leading axis B. With a sharded one every device runs it on its shard.
Table = Callable[..., Any]


@dataclass(frozen=True)
class Objective:
    """The settings of a head's loss.

    Attributes:
        loss: One of `LOSSES`.
        temperature: Temperature of the distillation.
        gamma: Weights of slots fall as exp(-depth / gamma); 0 is uniform.
        anchors: Blocks per sequence and step.
        chunk: Draft rows of a sequence per chunk of logits.
        smoothing: Smoothing of the confidences in the weights of "dpace", from 0 (none) to below 1.
    """

    loss: LossName = "forward_kl"
    temperature: float = 1.0
    gamma: float = 0.0
    anchors: int = 512
    chunk: int = 1024
    smoothing: float = 0.5


class DraftRows(NamedTuple):
    """Results of the draft rows.

    Attributes:
        loss: In nats.
        matches: Whether the likeliest token, or the best candidate, is the target's likeliest.
    """

    loss: Float[Array, "*rows"]
    matches: Bool[Array, "*rows"]


def draft_losses(
    student: Float[Array, "B N M"],
    teacher: Float[Array, "B T M"],
    rows: Int[Array, "B N"],
    labels: Int[Array, "B N"],
    table: Table,
    *,
    loss: LossName,
    temperature: float,
    chunk: int,
) -> DraftRows:
    """The loss of each draft row against the target's row that predicts the same token.

    With p the target's and q the head's distribution, both at ``temperature`` T and both by the target's
    output projection: forward KL ``T² KL(p || q)``, reverse KL ``T² KL(q || p)``, total variation
    ``sum |p - q| / 2``, which is the probability that speculative sampling rejects a draft, or, for "sft" and
    "dpace", ``-log q(label)`` at temperature 1.

    The target's logits are computed once per token, in the weights' dtype, because many blocks learn from one
    row; if there are fewer draft rows than tokens, once per draft row. The gradient with respect to
    ``student`` is computed with the loss, chunk by chunk, so the head's logits are computed once too. Other
    arguments have no gradient.

    Sources: the JetSpec paper's distillation objective and its baselines; total variation as in speculators'
    documentation and LK losses (arXiv 2602.23881).

    Args:
        student: The head's final-normed hidden states.
        teacher: The target's hidden states of all tokens.
        rows: For each draft row the index of the target's row.
        labels: For each draft row the text's token.
        table: The target's frozen output projection, also used for the head's rows.
        loss: One of `LOSSES`.
        temperature: T.
        chunk: Rows of a sequence per chunk of logits.
    """

    def computed(
        logits: Logits, draft_logits: Logits, teacher: Array, *draft: Array, gradient: bool
    ) -> tuple[Array, ...]:
        """Loss and match of all draft rows (states, rows and labels), and maybe the states' gradient."""
        # Of every token once, unless fewer rows are drafted than there are tokens.
        every = teacher.shape[1] <= draft[0].shape[1]
        given = jax.lax.stop_gradient(logits(teacher)) if every else None
        best = None if given is None else vocabulary.likeliest(given).astype(jnp.int32)

        def of_target(index: Array) -> tuple[Array, Array]:
            """Logits and likeliest tokens of the target's rows."""
            if given is not None and best is not None:
                rows = jnp.take_along_axis(given, index[:, :, None], axis=1)
                return rows, jnp.take_along_axis(best, index, axis=1)
            rows = jax.lax.stop_gradient(logits(jnp.take_along_axis(teacher, index[:, :, None], axis=1)))
            return rows, vocabulary.likeliest(rows)

        def losses(x: Array, index: Array, label: Array) -> tuple[Array, Array]:
            target_rows, likeliest = of_target(index)
            drafted = draft_logits(x)
            matches = vocabulary.likeliest(drafted) == likeliest
            if loss in HARD_LABELS:
                return -vocabulary.at(vocabulary.log_softmax(drafted.astype(jnp.float32)), label), matches
            log_q = vocabulary.log_softmax(drafted.astype(jnp.float32) / temperature)
            log_p = vocabulary.log_softmax(target_rows.astype(jnp.float32) / temperature)
            if loss == "total_variation":
                return vocabulary.total(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q))) / 2, matches
            if loss == "forward_kl":
                divergence = jnp.exp(log_p) * (log_p - log_q)
            else:
                divergence = jnp.exp(log_q) * (log_q - log_p)
            return vocabulary.total(divergence) * temperature**2, matches

        def with_gradient(x: Array, index: Array, label: Array) -> tuple[Array, Array, Array]:
            value, pull, matches = jax.vjp(lambda x: losses(x, index, label), x, has_aux=True)
            # All devices have the same loss, so each counts for its share; each has the gradient through its
            # shard of the vocabulary.
            return value, matches, shards.all_sum(pull(jnp.full_like(value, 1 / shards.count()))[0])

        return by_chunks(with_gradient if gradient else losses, draft, chunk)

    # A row's loss depends only on that row, so the backward pass only scales the stored gradient, whatever
    # the rows' weights.
    @jax.custom_vjp
    def run(teacher: Array, x: Array, index: Array, label: Array) -> tuple[Array, ...]:
        return table(partial(computed, gradient=False), teacher, x, index, label)

    def forward(teacher: Array, x: Array, index: Array, label: Array) -> tuple[tuple[Array, Array], Array]:
        value, matches, gradient = table(partial(computed, gradient=True), teacher, x, index, label)
        return (value, matches), gradient

    def backward(gradient: Array, cotangents: tuple[Array, Any]) -> tuple[None, Array, None, None]:
        return None, gradient * cotangents[0][:, :, None].astype(gradient.dtype), None, None

    run.defvjp(forward, backward)
    return DraftRows(*run(teacher, student, rows, labels))


def depth_weights(depth: int, gamma: float) -> Float[Array, "D"]:
    """Weight of each slot after the anchor: ``exp(-k / gamma)`` for k = 1..D, all ones for gamma 0.

    Source: the decay of DFlash's training; the JetSpec paper's default is none.
    """
    k = jnp.arange(1, depth + 1, dtype=jnp.float32)
    return jnp.exp(-k / gamma) if gamma else jnp.ones_like(k)


def pace_weights(
    losses: Float[Array, "*blocks D"], learn: Bool[Array, "*blocks D"], smoothing: float
) -> Float[Array, "*blocks D"]:
    """Weights of the slots of blocks by D-PACE: what each slot adds to the expected length of its block.

    With q the head's probability of the text's token and c = (1 - s) q + s, slot k adds
    ``sum over m >= k of c_1 ... c_m``. For confidences 1/2, 1/2 and 1/2 without smoothing that is
    1/2 + 1/4 + 1/8, 1/4 + 1/8 and 1/8. The weights have no gradient.

    Source: D-PACE (Wu et al., arXiv 2605.18810). Speculators' smoothing is 0.5.

    Args:
        losses: ``-log q`` of each slot.
        learn: The slots to learn; others have weight 0.
        smoothing: s.
    """
    counted = learn.astype(jnp.float32)
    confidence = (1 - smoothing) * jnp.exp(-jax.lax.stop_gradient(losses)) + smoothing
    reached = jnp.cumprod(jnp.where(learn, confidence, 1.0), axis=-1) * counted
    return counted * jax.lax.cumsum(reached, axis=reached.ndim - 1, reverse=True)


def accepted_length(matches: Bool[Array, "*blocks D"], learn: Bool[Array, "*blocks D"]) -> Mean:
    """Mean number of leading matches of the blocks: the accepted length of a greedy chain.

    Args:
        matches: Whether a slot's likeliest token is the target's.
        learn: The slots to learn; blocks without any do not count.
    """
    leading = jnp.cumprod((matches & learn).astype(jnp.float32), axis=-1)
    return Mean(jnp.sum(leading), jnp.sum(learn[..., 0].astype(jnp.float32)))


def by_chunks(function: Callable[..., Any], arrays: tuple[Array, ...], chunk: int) -> Any:
    """Maps a function over chunks of the arrays' second axis, one after the other.

    The first axis, of sequences, is not chunked because it is sharded over devices.
    """
    count = arrays[0].shape[1]
    chunk = min(chunk, count)
    chunks = -(-count // chunk)

    def split(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, chunks * chunk - count), *(((0, 0),) * (x.ndim - 2))))
        return jnp.moveaxis(x.reshape(x.shape[0], chunks, chunk, *x.shape[2:]), 1, 0)

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], chunks * chunk, *x.shape[3:])[:, :count]

    out = jax.lax.map(lambda part: function(*part), tuple(split(x) for x in arrays))
    return jax.tree.map(join, out)
