"""Distillation of a draft head from its frozen target. Shapes as in `train.loss.attention`."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Key, Shaped

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights, bind
from jetspec_jax.models.transformer import Transformer
from train.loss.attention import best_implementation, causal_attend
from train.loss.blocks import count_anchors, draft_blocks, learnable, lessons, sample_anchors
from train.loss.objectives import (
    Count,
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

    The target runs once over each sequence; its taps are the head's context and its rows the teacher. The
    loss is the mean over draft slots, weighted by depth or by D-PACE, of what `draft_losses` gives; slots
    that have nothing to learn do not count. The other means are loss and accuracy by depth, and the accepted
    length of a greedy chain without the bonus token. A batch with ``real`` is counted, too.

    Sequences with ``starts`` are packed: neither target nor head sees another document, and each document
    begins at position 0. A batch with ``states``, as `target_states` gives them, needs no run of the target.

    Args:
        head_config: The head.
        target_config: The target, whose weights are the loss's ``frozen`` argument.
        objective: Which loss, and over how many blocks.
        dtype: Of both forward passes.
        remat: Whether the backward pass computes the head's layers again.
    """
    slots = head_config.block_size

    def loss(weights: Weights, frozen: Weights, batch: dict[str, Array], key: Key[Array, ""]) -> Means:
        tokens, starts = batch["tokens"], batch.get("starts")
        learn = learnable(batch["learn"], starts)
        anchors = sample_anchors(key, learn, objective.anchors)
        teacher = Teacher(target_config, cast(frozen, dtype))
        # Whole on the devices that share the target, each of which computes the same: a head is small, and
        # need not divide as the target does. Only its rows' way through the target's table is shared.
        head = bind(head_config, whole(cast(weights, dtype)))
        if "states" in batch:
            hidden, taps = jnp.split(batch["states"], [target_config.hidden_size], axis=-1)
        else:
            hidden, taps = _states(teacher, head_config, tokens, starts, dtype)
        student = draft_blocks(head, teacher, tokens, taps, anchors, starts=starts, remat=remat)[:, :, 1:]
        task = lessons(tokens, learn, anchors, slots)
        b, a, d = task.rows.shape
        rows = draft_losses(
            student.reshape(b, a * d, -1),
            hidden,
            task.rows.reshape(b, a * d),
            task.labels.reshape(b, a * d),
            partial(teacher.read, capped=head_config.capped_logits),
            loss=objective.loss,
            temperature=objective.temperature,
            chunk=objective.chunk,
        )
        value, matches = rows.loss.reshape(b, a, d), rows.matches.reshape(b, a, d)
        counted = task.learn.astype(jnp.float32)
        if objective.loss == "dpace":
            weight = pace_weights(value, task.learn, objective.smoothing)
        else:
            weight = counted * depth_weights(d, objective.gamma)[None, None, :]

        def by_depth(x: Array) -> Mean:
            return Mean(jnp.sum(counted * x, axis=(0, 1)), jnp.sum(counted, axis=(0, 1)))

        means = {
            "loss": Mean(jnp.sum(weight * value), jnp.sum(weight)),
            "loss_by_depth": by_depth(value),
            "accuracy_by_depth": by_depth(matches.astype(jnp.float32)),
            "accepted_length": accepted_length(matches, task.learn),
        }
        if "real" not in batch:
            return means
        return means | {
            "real_tokens": Count(jnp.sum(batch["real"])),
            "learnable_tokens": Count(jnp.sum(learn)),
            "distinct_anchors": Count(count_anchors(anchors, learn)),
        }

    return loss


def target_states(
    head_config: DraftHeadConfig, target_config: ModelConfig, dtype: jnp.dtype
) -> Callable[[Weights, dict[str, Array]], Shaped[Array, "B T X"]]:
    """What the loss reads of the target's run over a batch, for batches that keep it.

    Returns:
        A function of the frozen weights and a batch. It gives the last hidden states and the taps side by
        side, in the dtype, ``[B, T, M + F]``.
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
    # Chosen here, as devices that run together cannot try anything out.
    implementation = best_implementation(dtype, tokens.shape[1], packed=starts is not None)

    def states(target: Transformer, tokens: Array, starts: Array | None = None) -> tuple[Array, Array]:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        positions = positions if starts is None else positions - starts
        attend = causal_attend(implementation, starts)
        out = target(tokens, positions, attend, taps=head_config.tap_layers)
        return out.hidden, out.taps

    return teacher(states, tokens) if starts is None else teacher(states, tokens, starts)
