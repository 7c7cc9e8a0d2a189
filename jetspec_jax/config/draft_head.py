"""The ``config.json`` of a draft head, in the published layout or in a dialect of another engine."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jetspec_jax.arguments import shown
from jetspec_jax.config import qwen3
from jetspec_jax.config.fields import Fields
from jetspec_jax.config.geometry import DraftHeadConfig, ModelConfig
from jetspec_jax.config.head_dialects import read_head_keys
from jetspec_jax.config.quantization import read_quantization
from jetspec_jax.config.target import is_draft_head, parse_model_config


def parse_config(
    raw: Mapping[str, Any], *, ignore_config_keys: Collection[str] = (), where: str = "config.json"
) -> ModelConfig | DraftHeadConfig:
    """Validates the ``config.json`` of a target or of a draft head, as `parse_model_config` does."""
    parse = parse_draft_head_config if is_draft_head(raw) else parse_model_config
    return parse(raw, ignore_config_keys=ignore_config_keys, where=where)


def parse_draft_head_config(
    raw: Mapping[str, Any], *, ignore_config_keys: Collection[str] = (), where: str = "config.json"
) -> DraftHeadConfig:
    """Validates the ``config.json`` of a draft head.

    The arguments are those of `parse_model_config`.
    """
    if not is_draft_head(raw):
        raise ValueError(f"{where} has no dflash_config: it is not a draft head; load it with load_target")
    fields = Fields(raw, where, ignore_config_keys)
    decoder, keys = read_head_keys(fields)
    if (model_type := decoder.get("model_type")) != "qwen3":
        raise ValueError(
            f"{decoder.where}: unknown model_type {shown(model_type)} of a draft head; supported: qwen3"
        )
    layers = replace(qwen3.read(decoder), quantization=read_quantization(decoder))
    if any(window is not None for window in layers.windows):
        raise ValueError(f"{decoder.where}: sliding-window layers in a draft head are not supported")
    if (width := keys.pop("target_hidden_size")) not in (None, layers.hidden_size):
        raise ValueError(
            f"{where}: target_hidden_size {width} differs from the head's hidden_size "
            f"{layers.hidden_size}; heads that adapt another hidden size are not supported, because the "
            "target's embeddings enter the head unprojected"
        )
    if (size := keys.pop("draft_vocab_size")) not in (None, layers.vocab_size):
        raise ValueError(
            f"{where}: draft_vocab_size {shown(size)} differs from the head's vocab_size "
            f"{layers.vocab_size}; heads that draft a part of the vocabulary are not supported"
        )
    if keys["tap_layers"] is None:  # only in the dialect that has the number of the target's layers
        keys["tap_layers"] = tuple(default_tap_layers(layers.num_layers, keys["num_target_layers"]))
    decoder.done(top=True)
    return DraftHeadConfig(layers=layers, **keys)


def default_tap_layers(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """Default tap layers: evenly spaced from layer 1 to the third layer from the end.

    Source: the published DFlash checkpoints' convention.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 3 - 1
    return [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def check_head_fits(head: DraftHeadConfig, target: ModelConfig) -> None:
    """Checks that a draft head fits a target, and reports all mismatches in one error."""
    wrong = []
    if head.layers.hidden_size != target.hidden_size:
        wrong.append(
            f"the head's hidden_size is {head.layers.hidden_size}, the target's {target.hidden_size}"
        )
    if head.num_target_layers not in (None, target.num_layers):
        wrong.append(
            f"the head was made for {head.num_target_layers} target layers, the target has "
            f"{target.num_layers}"
        )
    beyond = [layer for layer in head.tap_layers if not 0 <= layer < target.num_layers]
    if beyond:
        wrong.append(f"tap layers {beyond} lie outside the target's layers 0..{target.num_layers - 1}")
    if head.mask_token_id >= target.vocab_size:
        wrong.append(
            f"mask_token_id {head.mask_token_id} lies outside the target's vocabulary of {target.vocab_size}"
        )
    if head.layers.vocab_size != target.vocab_size:
        wrong.append(
            f"the head was made for a vocabulary of {head.layers.vocab_size}, the target's has "
            f"{target.vocab_size}"
        )
    if head.capped_logits and target.logit_softcap is None:
        wrong.append("the head needs the target's logit cap (capped_logits), and the target has none")
    if wrong:
        raise ValueError("the draft head does not fit the target: " + "; ".join(wrong))
