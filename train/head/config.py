"""The ``config.json`` of a new draft head, with the keys of the published heads."""

from typing import Any

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.config import ModelConfig, default_tap_layers
from train.head.recipe import HeadShape

#: Of a published head.
DEFAULT_LAYERS, DEFAULT_BLOCK_SIZE = 5, 16
#: How it meets a target that scales its embeddings or caps its logits; unset, as the published heads do.
FLAGS = ("scaled_embeddings", "capped_logits")
#: Features of its feed-forward blocks, in widths of the model, where the target has no such block to copy.
DEFAULT_MLP_RATIO = 3


def head_json(target: Target, shape: HeadShape) -> dict[str, Any]:
    """The ``config.json`` of a new head for a target, with the keys of the published heads.

    Raises:
        ValueError: The taps lie beyond the target, or no mask token is to be had.
    """
    config = target.config
    layers = DEFAULT_LAYERS if shape.layers is None else shape.layers
    taps = default_tap_layers(layers, config.num_layers) if shape.taps is None else shape.taps
    if beyond := [tap for tap in taps if not 0 <= tap < config.num_layers]:
        raise ValueError(f"taps {beyond} lie outside the target's layers 0..{config.num_layers - 1}")
    mlp = config.layers[0].mlp_size or DEFAULT_MLP_RATIO * config.hidden_size
    if shape.intermediate_size is not None:
        mlp = shape.intermediate_size
    return {
        "architectures": ["DFlashDraftModel"],
        **decoder_json(config, layers, mlp),
        "tie_word_embeddings": False,
        "block_size": DEFAULT_BLOCK_SIZE if shape.block_size is None else shape.block_size,
        "num_target_layers": config.num_layers,
        "dflash_config": {
            "causal_head": shape.causal is not False,
            "mask_token_id": mask_token_id(target, shape.mask_token),
            "target_layer_ids": list(taps),
            **{key: value for key in FLAGS if (value := getattr(shape, key)) is not None},
        },
    }


def decoder_json(config: ModelConfig, layers: int, intermediate_size: int) -> dict[str, Any]:
    """The keys of a Qwen3-style decoder with the heads of a target's first layer, in the older dialect.

    Its rotary base is that of the target's full attention; a scaling of it is not taken over.
    """
    own = config.layers[0]
    # The head's attention has no window: its positions turn as those of the target's layers without one.
    full = next((layer for layer in config.layers if layer.window is None), own)
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": own.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": own.num_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": own.num_kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": full.rope.theta,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def mask_token_id(target: Target, token: str | int | None) -> int:
    """The id of the token in the slots after the anchor.

    Raises:
        ValueError: It is no token of the target, or none was named and the tokenizer has no mask token.
    """
    found = token if isinstance(token, int) else _id_of(target.tokenizer, token)
    if found is None:
        wanted = "mask token" if token is None else f"token {token!r}"
        raise ValueError(
            f"the tokenizer has no {wanted}; set head.mask_token to the id of a token that text never holds, "
            f"below {target.config.vocab_size}"
        )
    if not 0 <= found < target.config.vocab_size:
        raise ValueError(
            f"mask token {found} lies outside the target's vocabulary of {target.config.vocab_size}"
        )
    return found


def _id_of(tokenizer: Any, token: str | None) -> int | None:
    """The id of a token by its name; of the mask token for None."""
    if tokenizer is None:
        return None
    return tokenizer.get_vocab().get(tokenizer.mask_token if token is None else token)
