"""The ``config.json`` of a draft head: the layout of the published JetSpec and DFlash heads."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from jetspec_jax.arguments import shown
from jetspec_jax.config import qwen3
from jetspec_jax.config.fields import MAX_LAYERS, Fields, is_int
from jetspec_jax.config.geometry import DraftHeadConfig, ModelConfig
from jetspec_jax.config.quantization import read_quantization
from jetspec_jax.config.target import is_draft_head, parse_model_config

#: The most draft slots that are read; a tree of 256 nodes could be no deeper than 255.
MAX_BLOCK = 256


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

    Raises:
        ValueError: As for `parse_model_config`, and for a ``dflash_config`` that makes no head.
    """
    if not is_draft_head(raw):
        raise ValueError(f"{where} has no dflash_config: it is not a draft head; load it with load_target")
    fields = Fields(raw, where, ignore_config_keys)
    if (model_type := fields.get("model_type")) != "qwen3":
        raise ValueError(f"{where}: unknown model_type {shown(model_type)} of a draft head; supported: qwen3")
    dflash = fields.object("dflash_config")
    if dflash is None:
        raise fields.error("dflash_config", "an object", None)
    layers = replace(qwen3.read(fields), quantization=read_quantization(fields))
    if any(window is not None for window in layers.windows):
        raise ValueError(f"{where}: sliding-window layers in a draft head are not supported")
    block_size = fields.integer("block_size", least=2, most=MAX_BLOCK)
    num_target_layers = fields.integer("num_target_layers", most=MAX_LAYERS)
    mask_token_id = dflash.integer("mask_token_id", least=0)
    target_hidden_size = dflash.get("target_hidden_size", layers.hidden_size)
    if target_hidden_size != layers.hidden_size:
        raise ValueError(
            f"{where}: target_hidden_size {target_hidden_size} differs from the head's hidden_size "
            f"{layers.hidden_size}; heads that adapt another hidden size are not supported, because the "
            "target's embeddings enter the head unprojected"
        )
    if dflash.get("draft_shift"):
        raise ValueError(f"{where}: draft_shift is not supported; published heads use it off")
    config = DraftHeadConfig(
        layers=layers,
        block_size=block_size,
        num_target_layers=num_target_layers,
        tap_layers=_tap_layers(dflash, where, layers.num_layers, num_target_layers),
        mask_token_id=mask_token_id,
        causal=_causal(dflash),
        scaled_embeddings=dflash.flag("scaled_embeddings", default=True),
        capped_logits=dflash.flag("capped_logits", default=False),
        target_format=_target_format(dflash),
    )
    dflash.done()
    fields.done(top=True)
    return config


def default_tap_layers(num_draft_layers: int, num_target_layers: int) -> list[int]:
    """Tap layers of a head whose config names none: evenly spaced from 1 to the third layer from the end.

    Source: the published DFlash checkpoints' convention.
    """
    if num_draft_layers == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 3 - 1
    return [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]


def check_head_fits(head: DraftHeadConfig, target: ModelConfig) -> None:
    """Checks that a draft head can run on a target; all that is wrong is said at once.

    Raises:
        ValueError: The head was made for another target.
    """
    wrong = []
    if head.layers.hidden_size != target.hidden_size:
        wrong.append(
            f"the head's hidden_size is {head.layers.hidden_size}, the target's {target.hidden_size}"
        )
    if head.num_target_layers != target.num_layers:
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
        wrong.append("the head's logits go through the target's cap (capped_logits), and the target has none")
    if wrong:
        raise ValueError("the draft head does not fit the target: " + "; ".join(wrong))


def _tap_layers(dflash: Fields, where: str, num_layers: int, num_target_layers: int) -> tuple[int, ...]:
    taps = dflash.get("target_layer_ids")
    if taps is None:
        taps = default_tap_layers(num_layers, num_target_layers)
    elif not isinstance(taps, list) or not taps or not all(map(is_int, taps)):
        raise ValueError(f"{where}: target_layer_ids must be a list of layer indices, not {taps!r}")
    return tuple(taps)


def _target_format(dflash: Fields) -> str:
    """How the target was quantised that the head was trained with; empty: not."""
    found = dflash.get("target_format", "")
    if not isinstance(found, str):
        raise dflash.error("target_format", "a text", found)
    return found


def _causal(dflash: Fields) -> bool:
    """Published JetSpec heads say ``causal_head``, others ``causal``; a head that says nothing is not."""
    found = {key: dflash.flag(key) for key in ("causal_head", "causal") if key in dflash}
    if len(set(found.values())) > 1:
        raise ValueError(f"{dflash.where} has causal_head and causal, and they disagree")
    return any(found.values())
