"""The ``config.json`` of a new draft head, with the keys of the published heads."""

from collections.abc import Mapping
from typing import Any

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.config import ModelConfig, SelectorConfig, default_tap_layers
from train.head.recipe import HeadSettings

#: Values of the published heads.
DEFAULT_LAYERS, DEFAULT_BLOCK_SIZE = 5, 16
#: Settings for targets that scale their embeddings or cap their logits; left out where they are not set.
FLAGS = ("scaled_embeddings", "capped_logits")
#: Feed-forward features per model width, where the target has no dense block to copy the size from.
DEFAULT_MLP_RATIO = 3


def head_json(target: Target, settings: HeadSettings) -> dict[str, Any]:
    """The ``config.json`` of a new head for a target, with the keys of the published heads.

    Raises:
        ValueError: The taps lie outside the target's layers, or there is no mask token.
    """
    config = target.config
    layers = DEFAULT_LAYERS if settings.layers is None else settings.layers
    taps = default_tap_layers(layers, config.num_layers) if settings.taps is None else settings.taps
    if beyond := [tap for tap in taps if not 0 <= tap < config.num_layers]:
        raise ValueError(f"taps {beyond} lie outside the target's layers 0..{config.num_layers - 1}")
    mlp = config.layers[0].mlp_size or DEFAULT_MLP_RATIO * config.hidden_size
    if settings.intermediate_size is not None:
        mlp = settings.intermediate_size
    raw = {
        "architectures": ["DFlashDraftModel"],
        **decoder_json(config, layers, mlp),
        "tie_word_embeddings": False,
        "block_size": DEFAULT_BLOCK_SIZE if settings.block_size is None else settings.block_size,
        "num_target_layers": config.num_layers,
        "dflash_config": {
            "causal_head": settings.causal is not False,
            "mask_token_id": mask_token_id(target, settings.mask_token),
            "target_layer_ids": list(taps),
            **{key: value for key in FLAGS if (value := getattr(settings, key)) is not None},
        },
    }
    return trained_with(target, raw)


def trained_with(target: Target, raw: Mapping[str, Any]) -> dict[str, Any]:
    """A head's ``config.json`` with the format to which its target's weights were rounded, if any."""
    dflash = {key: value for key, value in raw["dflash_config"].items() if key != "target_format"}
    rounding = target.config.rounding
    formats = {"target_format": rounding} if rounding else {}
    return {**raw, "dflash_config": {**dflash, **formats}}


def with_selector(raw: Mapping[str, Any], selector: SelectorConfig | None) -> dict[str, Any]:
    """A head's ``config.json`` in the published layout with another selector, or without one.

    Scales of the head's errors are left out.
    """
    names = ("selector_rank", "selector_top_k", "selector_tail", "draft_scales")
    dflash = {key: value for key, value in raw["dflash_config"].items() if key not in names}
    if selector is not None:
        tail = {"selector_tail": True} if selector.tail else {}
        dflash |= {"selector_rank": selector.rank, "selector_top_k": selector.candidates, **tail}
    return {**raw, "dflash_config": dflash}


def decoder_json(config: ModelConfig, layers: int, intermediate_size: int) -> dict[str, Any]:
    """The keys of a Qwen3-style decoder with the heads of a target's first layer of attention.

    The keys are those of Transformers 4. The rotary base is that of the target's full attention; its scaling
    is not copied.

    Raises:
        ValueError: The target has no attention.
    """
    layer = next((layer for layer in config.layers if layer.recurrence is None), None)
    if layer is None:
        raise ValueError(
            "the target has no attention layer; a draft head copies the number and size of its heads"
        )
    # The head's attention has no window, so its rotary base is that of a layer without a window.
    full = next((layer for layer in config.layers if layer.window is None), layer)
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": layer.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": layer.num_heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": layer.num_kv_heads,
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
    """The id of the token that fills the slots after the anchor.

    Raises:
        ValueError: The target has no such token, or ``token`` is None and the tokenizer has no mask token.
    """
    found = token if isinstance(token, int) else _id_of(target.tokenizer, token)
    if found is None:
        missing = "mask token" if token is None else f"token {token!r}"
        raise ValueError(
            f"the tokenizer has no {missing}; set head.mask_token to the id of a token that text never "
            f"holds, below {target.config.vocab_size}"
        )
    if not 0 <= found < target.config.vocab_size:
        raise ValueError(
            f"mask token {found} lies outside the target's vocabulary of {target.config.vocab_size}"
        )
    return found


def _id_of(tokenizer: Any, token: str | None) -> int | None:
    """The id of a token; of None, the tokenizer's mask token."""
    if tokenizer is None:
        return None
    return tokenizer.get_vocab().get(tokenizer.mask_token if token is None else token)
