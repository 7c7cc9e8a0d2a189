"""Pretraining of a target on windows of the corpus. Shapes: B windows of T tokens, V vocabulary."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt16

from jetspec_jax.checkpoint import resolve_dtype
from jetspec_jax.config import ModelConfig
from jetspec_jax.models import Weights, bind, build, weights_of
from train.attention import causal_attend
from train.objectives import next_token_loss
from train.recipes import Fit, Recipe
from train.stages import Deadline
from train.tokens import Stream, draw_windows
from train.trainer import Loss, Metrics, train

# Rows of logits made at a time: 4,096 entries each in float32 make 0.5 GB.
CHUNK = 32768
# Windows of the validation split, at most.
VALIDATION_WINDOWS = 128


def cast(weights: Weights, dtype: jnp.dtype) -> Weights:
    """Weights as a forward pass uses them; the gradient goes to what was cast."""
    return jax.tree.map(lambda w: w.astype(dtype), weights)


def validator(loss: Loss, keys: Key[Array, "n"], dtype: jnp.dtype) -> Callable[[Weights, Any], Metrics]:
    """Mean of a loss and its metrics over fixed draws, of weights rounded to bfloat16, which ship."""

    @jax.jit
    def validate(weights: Weights, data: Any, keys: Key[Array, "n"]) -> Metrics:
        rounded = cast(cast(weights, jnp.dtype(jnp.bfloat16)), dtype)
        value, metrics = jax.lax.map(lambda key: loss(rounded, data, key), keys)
        return jax.tree.map(lambda x: jnp.mean(x, axis=0), {"loss": value, **metrics})

    return lambda weights, data: validate(weights, data, keys)


def token_losses(
    config: ModelConfig, weights: Weights, tokens: Int[Array, "B window"]
) -> Float[Array, "B T"]:
    """Negative log-likelihood, in nats, of each window's tokens after the first."""
    model = bind(config, weights)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None, :], inputs.shape)
    hidden = model(inputs, positions, causal_attend()).hidden
    rows = hidden.reshape(-1, hidden.shape[-1])
    return next_token_loss(rows, labels.reshape(-1), model.logits, chunk=CHUNK).reshape(labels.shape)


def pretraining_loss(config: ModelConfig, fit: Fit, dtype: jnp.dtype) -> Loss:
    """Mean negative log-likelihood of windows drawn from a stream."""

    def loss(
        weights: Weights, data: UInt16[Array, "S"], key: Key[Array, ""]
    ) -> tuple[Float[Array, ""], Metrics]:
        tokens = draw_windows(key, data, fit.batch, fit.window + 1)
        return jnp.mean(token_losses(config, cast(weights, dtype), tokens)), {}

    return loss


def train_target(
    folder: Path,
    recipe: Recipe,
    config: ModelConfig,
    stream: Stream,
    validation: Stream,
    deadline: Deadline,
) -> Weights:
    """Trains a target from nothing, with float32 masters, and returns its best weights.

    Raises:
        OutOfTime: The deadline passed; calling again goes on.
        ValueError: The validation stream is shorter than a window.
    """
    fit, dtype = recipe.target_fit, resolve_dtype("auto")
    width = fit.window + 1
    count = min(VALIDATION_WINDOWS, len(validation) // width)
    if not count:
        raise ValueError(f"the validation split of {len(validation)} tokens has no window of {width}")
    count -= count % min(count, fit.batch)
    windows = jnp.asarray(validation[: count * width].reshape(-1, min(count, fit.batch), width), jnp.int32)

    @jax.jit
    def mean_loss(weights: Weights, windows: Int[Array, "n B T"]) -> Float[Array, ""]:
        # bfloat16 is what ships, so it is what decides.
        weights = cast(cast(weights, jnp.dtype(jnp.bfloat16)), dtype)
        return jnp.mean(jax.lax.map(partial(token_losses, config, weights), windows))

    return train(
        folder,
        fit,
        pretraining_loss(config, fit, dtype),
        weights_of(build(config, rngs=nnx.Rngs(recipe.seed))),
        jnp.asarray(np.asarray(stream)),
        validate=lambda weights: {"loss": mean_loss(weights, windows)},
        seed=recipe.seed,
        deadline=deadline,
        label="target",
    )
