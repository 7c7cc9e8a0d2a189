"""The ``config.json`` of a target model."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.arguments import shown
from jetspec_jax.config import (
    gemma3,
    gemma4,
    gpt_oss,
    llama,
    mistral,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    step,
)
from jetspec_jax.config.fields import Fields, is_int
from jetspec_jax.config.geometry import ModelConfig
from jetspec_jax.config.head_dialects import DFLASH, SPECULATORS
from jetspec_jax.config.quantization import read_quantization

#: Reads a family's keys.
Read = Callable[[Fields], ModelConfig]


class Wrapper(NamedTuple):
    """A multimodal model, whose config has its text model's config under ``text_config``.

    ``inert`` keys are at the top level: other modalities and their tokens.
    """

    text_type: str
    inert: tuple[str, ...]


#: The reader of each family; `jetspec_jax.models` has a class for each, and adds families at run time.
READERS: dict[str, Read] = {
    "llama": llama.read,
    "mistral": mistral.read,
    "qwen2": qwen2.read,
    "qwen3": qwen3.read,
    "qwen3_moe": qwen3_moe.read,
    "gemma3_text": gemma3.read,
    "gemma4_text": gemma4.read,
    "gpt_oss": gpt_oss.read,
    "step3p5": step.read,
    "qwen3_5_text": qwen3_5.read_dense,
    "qwen3_5_moe_text": qwen3_5.read_moe,
    "qwen3_next": qwen3_next.read,
}
#: Multimodal models, of which only the text model is used.
WRAPPERS: Mapping[str, Wrapper] = {
    "gemma3": Wrapper("gemma3_text", gemma3.WRAPPER_KEYS),
    "gemma4": Wrapper("gemma4_text", gemma4.WRAPPER_KEYS),
    "step3p7": Wrapper("step3p5", step.WRAPPER_KEYS),
    "qwen3_5": Wrapper("qwen3_5_text", qwen3_5.WRAPPER_KEYS),
    "qwen3_5_moe": Wrapper("qwen3_5_moe_text", qwen3_5.WRAPPER_KEYS),
}

_POSITIONS = "its rotary embedding has positions on three axes, and images enter several layers"
#: Unsupported relatives of these families, with the reason; text models have the suffix "_text".
RELATIVES: Mapping[str, str] = {
    "llama4": "its layers without rotary embeddings scale queries by position",
    "qwen2_moe": "it has biases in attention together with routed and shared experts",
    "qwen2_vl": _POSITIONS,
    "qwen3_vl": _POSITIONS,
    "qwen3_vl_moe": _POSITIONS,
    "gemma2": "its attention scores are capped",
    "gemma3n": "it has embeddings for each layer, and layers that share keys and values",
}


def is_draft_head(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes a draft head rather than a target."""
    return DFLASH in raw or SPECULATORS in raw


def parse_model_config(
    raw: Mapping[str, Any], *, ignore_config_keys: Collection[str] = (), where: str = "config.json"
) -> ModelConfig:
    """Validates the ``config.json`` of a target.

    Args:
        raw: The parsed JSON.
        ignore_config_keys: Unknown keys to ignore. Known keys cannot be ignored.
        where: The file's name in error messages.

    Raises:
        ValueError: The model type, a rope type or a key is unknown or unsupported, or a key is missing or out
            of its range.
    """
    if is_draft_head(raw):
        raise ValueError(f"{where} describes a draft head; load it with load_draft_head")
    fields = Fields(raw, where, ignore_config_keys)
    given = fields.get("model_type")
    model_type = given if isinstance(given, str) else ""
    if model_type in WRAPPERS:
        config = _read_wrapped(fields, WRAPPERS[model_type])
    elif model_type in READERS:
        config = _with_quantization(READERS[model_type](fields), fields)
    else:
        reason = RELATIVES.get(model_type.removesuffix("_text"))
        known = f"unknown model_type {shown(given)}"
        if reason is not None:
            known = f"model_type {model_type!r} is not supported: {reason}"
        raise ValueError(f"{where}: {known}; supported: {', '.join((*READERS, *WRAPPERS))}")
    fields.done(top=True)
    return config


def _read_wrapped(fields: Fields, wrapper: Wrapper) -> ModelConfig:
    text = fields.object("text_config")
    if text is None:
        raise fields.error("text_config", "an object", None)
    if (text_type := text.get("model_type", wrapper.text_type)) != wrapper.text_type:
        raise text.error("model_type", repr(wrapper.text_type), text_type)
    config = _with_quantization(READERS[wrapper.text_type](text), text, fields)
    text.done(top=True)
    # The multimodal class owns the output head, so its flag takes precedence, as in transformers.
    tied = fields.flag("tie_word_embeddings", default=config.tie_word_embeddings)
    fields.inert(*wrapper.inert)
    return replace(config, tie_word_embeddings=tied)


def _with_quantization(config: ModelConfig, *places: Fields) -> ModelConfig:
    """Adds the quantisation from the first object that has one."""
    if config.model_type == "gpt_oss":  # its reader has read the key
        return config
    found = [quantization for fields in places if (quantization := read_quantization(fields)) is not None]
    return replace(config, quantization=found[0]) if found else config


def parse_eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None, *, folder: str | Path = ""
) -> tuple[int, ...]:
    """End-of-sequence token ids from both files, those of ``generation_config.json`` first.

    The files often differ: one has the end of a document, the other the end of a turn. A multimodal model has
    ids at the top level of its config, in ``text_config``, or in both.
    """
    text, found = config.get("text_config"), []
    for name, raw in (
        ("generation_config.json", generation_config or {}),
        ("config.json", config),
        ("config.json: text_config", text if isinstance(text, Mapping) else {}),
    ):
        eos = raw.get("eos_token_id")
        if eos is None:
            continue
        ids = eos if isinstance(eos, list) else [eos]
        if not all(is_int(token) and token >= 0 for token in ids):
            where = Path(folder) / name
            raise ValueError(f"{where}: eos_token_id must be a token id or a list of them, not {shown(eos)}")
        found += ids
    return tuple(dict.fromkeys(found))
