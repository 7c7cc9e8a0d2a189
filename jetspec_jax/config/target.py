"""The ``config.json`` of a target, by its family."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from jetspec_jax.config import qwen3, qwen3_moe
from jetspec_jax.config.fields import Fields, is_int
from jetspec_jax.config.geometry import ModelConfig

#: Reads a family's keys.
Read = Callable[[Fields], ModelConfig]

#: The families whose configs are read; `jetspec_jax.models` has a class for each.
READERS: Mapping[str, Read] = {
    "qwen3": qwen3.read,
    "qwen3_moe": qwen3_moe.read,
}
MODEL_TYPES = tuple(READERS)


def is_draft_head(raw: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` describes a draft head rather than a target."""
    return "dflash_config" in raw


def parse_model_config(
    raw: Mapping[str, Any], *, ignore_config_keys: Collection[str] = (), where: str = "config.json"
) -> ModelConfig:
    """Validates the ``config.json`` of a target.

    Args:
        raw: The parsed JSON.
        ignore_config_keys: Unknown keys that the caller vouches for as having no effect.
        where: What error messages call the file.

    Raises:
        ValueError: The model type, a rope type or a key is unknown or unsupported, or a key is missing.
    """
    if is_draft_head(raw):
        raise ValueError(f"{where} describes a draft head; load it with load_draft_head")
    fields = Fields(raw, where, ignore_config_keys)
    config = check_model_type(fields)(fields)
    fields.done(top=True)
    return config


def check_model_type(fields: Fields) -> Read:
    """What reads a config of its model type.

    Raises:
        ValueError: The type is unknown.
    """
    model_type = fields.get("model_type")
    if model_type not in READERS:
        raise ValueError(
            f"{fields.where}: unknown model_type {model_type!r}; supported: {', '.join(READERS)}"
        )
    return READERS[model_type]


def parse_eos_token_ids(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None
) -> tuple[int, ...]:
    """End-of-sequence ids: those of ``generation_config.json`` where it has any, else those of the config.

    Raises:
        ValueError: An id is no token id.
    """
    for raw in (generation_config or {}, config):
        eos = raw.get("eos_token_id")
        if eos is not None:
            ids = eos if isinstance(eos, list) else [eos]
            if not all(is_int(token) and token >= 0 for token in ids):
                raise ValueError(f"eos_token_id must be a token id or a list of them, not {eos!r}")
            return tuple(ids)
    return ()
