"""A recipe's checkpoints in Hugging Face layout: their ``config.json``, and the folders."""

from pathlib import Path
from typing import Any

from jetspec_jax.models import Weights
from jetspec_jax.safetensors_io import save_checkpoint
from train.recipes import Geometry, Recipe
from train.stages import fresh
from train.tokenizer import END_OF_TEXT, MASK, SPECIAL, Tokenizer


def target_json(recipe: Recipe) -> dict[str, Any]:
    """The target's ``config.json``, in the dialect of transformers 4 that older engines read too."""
    end = SPECIAL.index(END_OF_TEXT)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "bos_token_id": end,
        "eos_token_id": end,
        **_decoder(recipe, recipe.target),
        "tie_word_embeddings": True,
    }


def head_json(recipe: Recipe) -> dict[str, Any]:
    """The draft head's ``config.json``, with the keys of the published heads."""
    return {
        "architectures": ["DFlashDraftModel"],
        **_decoder(recipe, recipe.head),
        "tie_word_embeddings": False,
        "block_size": recipe.distillation.block_size,
        "num_target_layers": recipe.target.layers,
        "dflash_config": {
            "causal_head": True,
            "mask_token_id": SPECIAL.index(MASK),
            "target_layer_ids": list(recipe.distillation.taps),
        },
    }


def write_target(folder: Path, recipe: Recipe, tokenizer: Tokenizer, weights: Weights) -> None:
    """Writes the target with its tokenizer, in bfloat16; what was in the folder goes."""
    files = tokenizer.files(max_length=recipe.context)
    save_checkpoint(fresh(folder), target_json(recipe), weights, extra_files=files)


def write_head(folder: Path, recipe: Recipe, weights: Weights) -> None:
    """Writes the draft head in bfloat16; what was in the folder goes."""
    save_checkpoint(fresh(folder), head_json(recipe), weights)


def _decoder(recipe: Recipe, sizes: Geometry) -> dict[str, Any]:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "initializer_range": 0.02,
        "intermediate_size": sizes.mlp,
        "max_position_embeddings": recipe.context,
        "max_window_layers": sizes.layers,
        "model_type": "qwen3",
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": recipe.rope_theta,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": recipe.vocab_size,
    }
