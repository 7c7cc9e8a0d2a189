"""The demo target in Hugging Face layout."""

from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import ModelConfig, Rope
from jetspec_jax.models import Weights
from train.data.tokenizer import END_OF_TEXT, SPECIAL, Tokenizer
from train.demo.recipes import Recipe
from train.head.config import decoder_json
from train.loop.stages import fresh


def target_json(recipe: Recipe) -> dict[str, Any]:
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


def write_target(folder: Path, recipe: Recipe, tokenizer: Tokenizer, weights: Weights) -> None:
    """Writes the target with its tokenizer, in bfloat16; what was in the folder goes."""
    files = tokenizer.files(max_length=recipe.context)
    save_checkpoint(fresh(folder), target_json(recipe), weights, extra_files=files)
