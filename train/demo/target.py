"""The demo target: pretrained on windows of the corpus, and written in Hugging Face layout.

Shapes: B windows of T tokens.
"""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, UInt16

from jetspec_jax.checkpoint.source import resolve_dtype
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import ModelConfig, Rope
from jetspec_jax.models import Weights, bind, build, weights_of
from train.demo.recipes import PairRecipe
from train.demo.tokenizer import END_OF_TEXT, SPECIAL, Tokenizer
from train.demo.tokens import Stream, draw_windows
from train.head.config import decoder_json
from train.loop.stages import Deadline, fresh
from train.loop.trainer import DrawnOnDevice, Evaluated, train
from train.loss.attention import causal_attend
from train.loss.objectives import Loss, Mean, Means, next_token_losses
from train.loss.precision import as_shipped, cast

# Rows of a window whose logits are computed at a time.
CHUNK = 2048
# Most windows of the validation split.
VALIDATION_WINDOWS = 128


def token_losses(
    config: ModelConfig, weights: Weights, tokens: Int[Array, "B window"]
) -> Float[Array, "B T"]:
    """Negative log-likelihood, in nats, of each window's tokens after the first."""
    model = bind(config, weights)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    positions = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None, :], inputs.shape)
    hidden = model(inputs, positions, causal_attend()).hidden
    return next_token_losses(hidden, labels, model.logits, chunk=CHUNK)


def pretraining_loss(config: ModelConfig, windows: int, window: int, dtype: jnp.dtype) -> Loss:
    """Mean negative log-likelihood of windows drawn from a stream, the loss's ``frozen`` argument."""

    def loss(weights: Weights, frozen: UInt16[Array, "S"], batch: Any, key: Key[Array, ""]) -> Means:
        nats = token_losses(config, cast(weights, dtype), draw_windows(key, frozen, windows, window + 1))
        return {"loss": Mean(jnp.sum(nats), jnp.float32(nats.size))}

    return loss


def train_target(
    folder: Path,
    recipe: PairRecipe,
    config: ModelConfig,
    stream: Stream,
    validation: Stream,
    deadline: Deadline,
) -> Weights:
    """Trains a target from random float32 weights and returns its best weights.

    Raises:
        OutOfTime: The deadline passed; call again to resume.
        ValueError: The validation stream is shorter than a window.
    """
    fit, dtype = recipe.target_fit, resolve_dtype("auto")
    width = recipe.target_window + 1
    count = min(VALIDATION_WINDOWS, len(validation) // width)
    if not count:
        raise ValueError(f"the validation split of {len(validation)} tokens has no window of {width}")
    count -= count % min(count, fit.batch)
    windows = jnp.asarray(validation[: count * width].reshape(-1, min(count, fit.batch), width), jnp.int32)

    @jax.jit
    def mean_loss(weights: Weights, windows: Int[Array, "n B T"]) -> Float[Array, ""]:
        return jnp.mean(jax.lax.map(partial(token_losses, config, as_shipped(weights, dtype)), windows))

    def evaluate(weights: Weights) -> Evaluated:
        loss = float(mean_loss(weights, windows))
        return Evaluated({"validation_loss": loss}, -loss)

    trained = train(
        folder,
        fit,
        pretraining_loss(config, fit.batch, recipe.target_window, dtype),
        weights_of(build(config, rngs=nnx.Rngs(recipe.seed))),
        frozen=jnp.asarray(np.asarray(stream)),
        batches=DrawnOnDevice(),
        evaluate=evaluate,
        seed=recipe.seed,
        deadline=deadline,
        label="target",
        tokens_per_step=fit.batch * recipe.target_window,
    )
    return trained.weights


def target_json(recipe: PairRecipe) -> dict[str, Any]:
    """The demo target's ``config.json``, in the dialect of transformers 4 that older engines read too."""
    sizes, end = recipe.target, SPECIAL.index(END_OF_TEXT)
    config = ModelConfig.uniform(
        "qwen3",
        sizes.layers,
        vocab_size=recipe.vocab_size,
        hidden_size=sizes.hidden,
        rms_norm_eps=1e-6,
        max_position_embeddings=recipe.context,
        tie_word_embeddings=True,
        num_heads=sizes.heads,
        num_kv_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        mlp_size=sizes.mlp,
        rope=Rope(recipe.rope_theta, sizes.head_dim),
    )
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": end,
        "eos_token_id": end,
        **decoder_json(config, sizes.layers, sizes.mlp),
        "tie_word_embeddings": True,
    }


def write_target(folder: Path, recipe: PairRecipe, tokenizer: Tokenizer, weights: Weights) -> None:
    """Writes the target with its tokenizer, in bfloat16, in place of what the folder holds."""
    files = tokenizer.files(max_length=recipe.context)
    save_checkpoint(fresh(folder), target_json(recipe), weights, extra_files=files)
