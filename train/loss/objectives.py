"""What a draft head or a target is trained to minimise: the losses of its rows, and their means.

Logits are the largest arrays of training, so they are computed and dropped chunk by chunk. ``logits`` maps
hidden rows ``[B, N, M]`` to ``[B, N, V]``. Shapes: B sequences, T tokens, N draft rows of a sequence, D draft
depth, M model, V vocabulary, or a device's part of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jetspec_jax.models import Weights
from pallas_kernels import shards
from train.loss import vocabulary

Logits = Callable[[Float[Array, "B N M"]], Float[Array, "B N V"]]

#: Forward KL to the target, reverse KL, the negative log-likelihood of the text's own next token, the total
#: variation from the target, or that likelihood with the weights of `pace_weights`.
LossName = Literal["forward_kl", "reverse_kl", "sft", "total_variation", "dpace"]
LOSSES: tuple[str, ...] = get_args(LossName)


class Mean(NamedTuple):
    """A weighted mean as total and weight, so that means of parts add up to the mean of the whole."""

    total: Float[Array, "*s"]
    weight: Float[Array, "*s"]

    def value(self) -> Float[Array, "*s"]:
        """The mean; 0 where nothing was weighed."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1.0)


class Count(NamedTuple):
    """A number of things of a batch; those of its parts add up."""

    total: Int[Array, ""]

    def value(self) -> Int[Array, ""]:
        """The number."""
        return self.total


#: Means by name; "loss" is what is minimised. Counts of the batch stand beside them.
Means = dict[str, Any]


@runtime_checkable
class Loss(Protocol):
    """What is minimised."""

    def __call__(self, weights: Weights, frozen: Any, batch: Any, key: Key[Array, ""]) -> Means:
        """The loss of the weights on a batch, and the other means to log."""
        ...


@runtime_checkable
class Table(Protocol):
    """The target's output table, which may lie on many devices."""

    def __call__(self, function: Callable[..., Any], *arrays: Array) -> Any:
        """What a function makes of the table and of arrays; all arrays and results have sequences first.

        Args:
            function: Takes the `Logits` that the target reads, those that the head reads, and the arrays.
                Where devices share the table, each runs it, with logits of its part of the vocabulary.
            *arrays: The arrays.
        """
        ...


@dataclass(frozen=True)
class Objective:
    """Which loss a head learns by, and from how many blocks.

    Attributes:
        loss: One of `LOSSES`.
        temperature: Temperature of the distillation.
        gamma: Weights of slots fall as exp(-depth / gamma); 0 is uniform.
        anchors: Blocks per sequence and step.
        chunk: Draft rows of a sequence whose logits exist at a time.
        smoothing: Of the confidences that "dpace" weights its slots by, from 0 (none) to below 1.
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
        matches: Whether the likeliest token is the target's.
    """

    loss: Float[Array, "B N"]
    matches: Bool[Array, "B N"]


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

    With p the target's and q the head's distribution, both at ``temperature`` T and both read by the target's
    own output table: forward KL ``T² KL(p || q)``, reverse KL ``T² KL(q || p)``, total variation
    ``sum |p - q| / 2``, which is the probability that speculative sampling rejects a draft, or, for "sft" and
    "dpace", ``-log q(label)`` at temperature 1.

    The target's logits are computed once per row, in the weights' dtype, because many blocks learn from one
    row; where fewer rows are drafted than the sequence has tokens, once per draft row. The gradient with
    regard to ``student`` is computed with the loss, chunk by chunk, so that the head's logits are computed
    once too; nothing else has a gradient.

    Sources: the JetSpec paper's distillation objective and the ones that it compares with; total variation as
    speculators' documentation and LK losses (arXiv 2602.23881) define it.

    Args:
        student: The head's final-normed hidden states.
        teacher: The target's, of all tokens.
        rows: For each draft row the index of the target's row.
        labels: For each draft row the text's token.
        table: The target's output table, which reads the head's rows too; it is frozen.
        loss: Which loss.
        temperature: T.
        chunk: Rows of a sequence whose logits exist at a time.
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
            own = draft_logits(x)
            matches = vocabulary.likeliest(own) == likeliest
            if loss in ("sft", "dpace"):
                return -vocabulary.at(vocabulary.log_softmax(own.astype(jnp.float32)), label), matches
            log_q = vocabulary.log_softmax(own.astype(jnp.float32) / temperature)
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
            # Of each device's loss its share counts, for they are all the same; and each has the derivative
            # that goes through its part of the vocabulary.
            return value, matches, shards.all_sum(pull(jnp.full_like(value, 1 / shards.count()))[0])

        return by_chunks(with_gradient if gradient else losses, draft, chunk)

    # A row's loss depends on that row alone, so its gradient is all that the backward pass needs, however the
    # rows are weighted later.
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


def next_token_losses(
    hidden: Float[Array, "B T M"], labels: Int[Array, "B T"], logits: Logits, *, chunk: int
) -> Float[Array, "B T"]:
    """Negative log-likelihood of each label, in nats; the backward pass computes the logits again."""

    def losses(x: Array, label: Array) -> Array:
        log_p = jax.nn.log_softmax(logits(x).astype(jnp.float32), axis=-1)
        return -jnp.take_along_axis(log_p, label[:, :, None], axis=2)[:, :, 0]

    return by_chunks(jax.checkpoint(losses), (hidden, labels), chunk)


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

    Source: D-PACE (Wu et al., arXiv 2605.18810), whose smoothing is that of speculators, 0.5.

    Args:
        losses: ``-log q`` of each slot.
        learn: Which slots are to be learnt; the others have no weight.
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
        learn: Which slots are to be learnt; a block without one does not count.
    """
    leading = jnp.cumprod((matches & learn).astype(jnp.float32), axis=-1)
    return Mean(jnp.sum(leading), jnp.sum(learn[..., 0].astype(jnp.float32)))


def by_chunks(function: Callable[..., Any], arrays: tuple[Array, ...], chunk: int) -> Any:
    """Maps a function over chunks of the arrays' second axis, one after the other.

    The first axis, of sequences, stays whole because it is split over devices.
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
