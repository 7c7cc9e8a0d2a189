"""Distillation of a draft head from its frozen target, on text that the target wrote.

Shapes as in `train.attention`; N sequences, F taps.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt16

from jetspec_jax.checkpoint import Target, resolve_dtype
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights, bind, build, weights_of
from train.attention import causal_attend
from train.blocks import draft_blocks, sample_anchors, teacher_rows
from train.objectives import accepted_length, depth_weights, forward_kl, weighted_mean
from train.recipes import Distillation, Recipe
from train.regenerate import Regenerated
from train.stages import Deadline
from train.target import cast, validator
from train.trainer import Loss, Metrics, train

# Sequences kept for validation, at most; the fixed draws that validate on them.
VALIDATION_SEQUENCES, VALIDATION_DRAWS = 256, 4


class HeadData(NamedTuple):
    """What a step draws from, and the frozen target that reads it.

    Attributes:
        tokens: Sequences.
        first: Index of each sequence's first token that the target wrote.
        target: The target's weights.
    """

    tokens: UInt16[Array, "N T"]
    first: Int[Array, "N"]
    target: Weights


def distillation_loss(
    head_config: DraftHeadConfig,
    target_config: ModelConfig,
    settings: Distillation,
    batch: int,
    dtype: jnp.dtype,
) -> Loss:
    """Forward KL to the target at every slot after the anchor, over random blocks of random sequences.

    Its metrics are the loss by depth, the accuracy by depth and the expected accepted length against the
    target's likeliest tokens: what a greedy chain would be accepted of, the bonus token not counted.
    """
    k = head_config.block_size

    def loss(weights: Weights, data: HeadData, key: Key[Array, ""]) -> tuple[Float[Array, ""], Metrics]:
        row_key, anchor_key = jax.random.split(key)
        rows = jax.random.randint(row_key, (batch,), 0, data.tokens.shape[0])
        tokens = data.tokens[rows].astype(jnp.int32)
        anchors = sample_anchors(anchor_key, data.first[rows], tokens.shape[1], settings.anchors, k)
        target = bind(target_config, cast(data.target, dtype))
        head = bind(head_config, cast(weights, dtype))
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None, :], tokens.shape)
        out = target(tokens, positions, causal_attend(), taps=head_config.tap_layers)
        student = draft_blocks(head, target, tokens, out.taps, anchors)[:, :, 1:]
        teacher = teacher_rows(out.hidden, anchors, k)
        kl, matches = forward_kl(
            student.reshape(-1, student.shape[-1]),
            teacher.reshape(-1, teacher.shape[-1]),
            target.logits,
            temperature=settings.temperature,
            chunk=settings.chunk,
        )
        kl, matches = kl.reshape(-1, k - 1), matches.reshape(-1, k - 1)
        return weighted_mean(kl, depth_weights(k - 1, settings.gamma)), {
            "loss_by_depth": jnp.mean(kl, axis=0),
            "accuracy_by_depth": jnp.mean(matches.astype(jnp.float32), axis=0),
            "accepted_length": accepted_length(matches),
        }

    return loss


def train_head(
    folder: Path,
    recipe: Recipe,
    config: DraftHeadConfig,
    target: Target,
    text: Regenerated,
    deadline: Deadline,
) -> Weights:
    """Trains a draft head from nothing, with float32 masters, and returns its best weights.

    Raises:
        OutOfTime: The deadline passed; calling again goes on.
        ValueError: Sequences are shorter than a block.
    """
    fit, dtype = recipe.head_fit, resolve_dtype("auto")
    if text.tokens.shape[1] <= config.block_size:
        raise ValueError(
            f"sequences of {text.tokens.shape[1]} tokens hold no block of {config.block_size} slots"
        )
    kept = min(VALIDATION_SEQUENCES, len(text.tokens) // 8)
    data, validation = (
        HeadData(jnp.asarray(text.tokens[part]), jnp.asarray(text.first[part]), target.weights)
        for part in (slice(kept, None), slice(kept))
    )
    loss = distillation_loss(config, target.config, recipe.distillation, fit.batch, dtype)
    keys = jax.random.split(jax.random.key(recipe.seed + 1), VALIDATION_DRAWS)

    validate = validator(loss, keys, dtype)

    return train(
        folder,
        fit,
        loss,
        weights_of(build(config, rngs=nnx.Rngs(recipe.seed + 1))),
        data,
        validate=lambda weights: validate(weights, validation),
        seed=recipe.seed + 1,
        deadline=deadline,
        label="head",
    )
