"""Distillation of a draft head from its frozen target. Shapes as in `train.loss.attention`."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, Shaped

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights, bind
from jetspec_jax.models.transformer import Transformer
from train.loss.attention import CausalAttend, best_implementation
from train.loss.blocks import Lessons, count_anchors, draft_blocks, learnable, lessons, sample_anchors
from train.loss.objectives import (
    Count,
    DraftRows,
    Loss,
    Mean,
    Means,
    Objective,
    accepted_length,
    depth_weights,
    draft_losses,
    pace_weights,
)
from train.loss.precision import cast, whole
from train.loss.teacher import Teacher


def distillation_loss(
    head_config: DraftHeadConfig,
    target_config: ModelConfig,
    objective: Objective,
    dtype: jnp.dtype,
    *,
    remat: bool = False,
) -> Loss:
    """The loss of a draft head over random blocks of the sequences of a batch.

    The target runs once over each sequence; its taps are the head's context, and its rows the teacher. The
    loss is the mean of `draft_losses` over draft slots with a token to learn, weighted by depth or by D-PACE.
    The other means are loss and accuracy by depth, and the accepted length of a greedy chain without the
    bonus token. A batch with ``real`` also has counts of its tokens.

    Sequences with ``starts`` are packed: target and head attend within a document, and each document begins
    at position 0. With ``states`` in the batch (see `target_states`), the target is not run.

    Args:
        target_config: The target, whose weights are the loss's ``frozen`` argument.
        objective: The kind of loss, and the number of blocks.
        dtype: Dtype of both forward passes.
        remat: Whether the backward pass recomputes the head's layers.
    """

    def loss(weights: Weights, frozen: Weights, batch: dict[str, Array], key: Key[Array, ""]) -> Means:
        drafts = draft_at_anchors(
            head_config, target_config, weights, frozen, batch, key, objective.anchors, dtype, remat=remat
        )
        rows, task = head_rows(drafts, head_config, objective), drafts.task
        weight = row_weights(rows.loss, task.learn, objective)
        return {
            "loss": Mean(jnp.sum(weight * rows.loss), jnp.sum(weight)),
            "loss_by_depth": by_depth(rows.loss, task.learn),
            "accuracy_by_depth": by_depth(rows.matches, task.learn),
            "accepted_length": accepted_length(rows.matches, task.learn),
            **batch_counts(drafts, batch),
        }

    return loss


class Drafts(NamedTuple):
    """A head's drafts at the anchors of a batch, and their labels.

    Attributes:
        teacher: The frozen target.
        hidden: The target's last hidden states of all tokens.
        student: The head's final-normed hidden states, except those of the anchors' slots.
        anchors: Indices of the anchors.
        learn: The mask of `learnable` tokens.
        task: The slots' labels.
    """

    teacher: Teacher
    hidden: Float[Array, "B T M"]
    student: Float[Array, "B A D M"]
    anchors: Int[Array, "B A"]
    learn: Bool[Array, "B T"]
    task: Lessons


def draft_at_anchors(
    head_config: DraftHeadConfig,
    target_config: ModelConfig,
    weights: Weights,
    frozen: Weights,
    batch: dict[str, Array],
    key: Key[Array, ""],
    anchors: int,
    dtype: jnp.dtype,
    *,
    remat: bool = False,
) -> Drafts:
    """Runs the target over a batch, and the head at ``anchors`` random places of each sequence."""
    tokens, starts = batch["tokens"], batch.get("starts")
    learn = learnable(batch["learn"], starts)
    places = sample_anchors(key, learn, anchors)
    teacher = Teacher(target_config, cast(frozen, dtype))
    # The head is replicated over the devices that shard the target: it is small, and its sizes need not
    # divide like the target's. Only the output projection of its rows is sharded.
    head = bind(head_config, whole(cast(weights, dtype)))
    if "states" in batch:
        hidden, taps = jnp.split(batch["states"], [target_config.hidden_size], axis=-1)
    else:
        hidden, taps = _states(teacher, head_config, tokens, starts, dtype)
    student = draft_blocks(head, teacher, tokens, taps, places, starts=starts, remat=remat)[:, :, 1:]
    task = lessons(tokens, learn, places, head_config.block_size)
    return Drafts(teacher, hidden, student, places, learn, task)


def target_states(
    head_config: DraftHeadConfig, target_config: ModelConfig, dtype: jnp.dtype
) -> Callable[[Weights, dict[str, Array]], Shaped[Array, "B T X"]]:
    """Computes the target's states that the loss reads, for caching.

    Returns:
        A function of the frozen weights and a batch that returns the last hidden states and the taps,
        concatenated, in ``dtype``: ``[B, T, M + F]``.
    """

    def states(frozen: Weights, batch: dict[str, Array]) -> Shaped[Array, "B T X"]:
        teacher = Teacher(target_config, cast(frozen, dtype))
        return jnp.concatenate(
            _states(teacher, head_config, batch["tokens"], batch.get("starts"), dtype), axis=-1
        )

    return states


def _states(
    teacher: Teacher, head_config: DraftHeadConfig, tokens: Array, starts: Array | None, dtype: jnp.dtype
) -> tuple[Array, Array]:
    """The target's last hidden states and taps."""
    # Chosen outside the sharded function, where the probe for cuDNN could not run.
    implementation = best_implementation(dtype, tokens.shape[1], packed=starts is not None)

    def states(target: Transformer, tokens: Array, starts: Array | None = None) -> tuple[Array, Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        positions = positions if starts is None else positions - starts
        attend = CausalAttend(implementation, starts)
        out = target(tokens, positions, attend, taps=head_config.tap_layers)
        return out.hidden, out.taps

    return teacher(states, tokens) if starts is None else teacher(states, tokens, starts)


def head_rows(drafts: Drafts, head_config: DraftHeadConfig, objective: Objective) -> DraftRows:
    """The head's loss and matches of every slot, ``[B, A, D]``."""
    b, a, d = drafts.task.rows.shape
    rows = draft_losses(
        drafts.student.reshape(b, a * d, -1),
        drafts.hidden,
        drafts.task.rows.reshape(b, a * d),
        drafts.task.labels.reshape(b, a * d),
        partial(drafts.teacher.read, capped=head_config.capped_logits),
        loss=objective.loss,
        temperature=objective.temperature,
        chunk=objective.chunk,
    )
    return DraftRows(*(x.reshape(b, a, d) for x in rows))


def row_weights(
    losses: Float[Array, "B A D"], learn: Bool[Array, "B A D"], objective: Objective
) -> Float[Array, "B A D"]:
    """Weights of the slots in the mean: by depth, or by D-PACE of the head's losses."""
    if objective.loss == "dpace":
        return pace_weights(losses, learn, objective.smoothing)
    return learn.astype(jnp.float32) * depth_weights(learn.shape[2], objective.gamma)[None, None, :]


def by_depth(values: Shaped[Array, "B A D"], learn: Bool[Array, "B A D"]) -> Mean:
    """Means of each depth over the slots to learn."""
    counted = learn.astype(jnp.float32)
    return Mean(jnp.sum(counted * values, axis=(0, 1)), jnp.sum(counted, axis=(0, 1)))


def batch_counts(drafts: Drafts, batch: dict[str, Array]) -> Means:
    """Counts of a batch's tokens; empty for a batch without ``real``."""
    if "real" not in batch:
        return {}
    return {
        "real_tokens": Count(jnp.sum(batch["real"])),
        "learnable_tokens": Count(jnp.sum(drafts.learn)),
        "distinct_anchors": Count(count_anchors(drafts.anchors, drafts.learn)),
    }
