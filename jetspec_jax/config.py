"""A Hugging Face ``config.json``, read and validated into frozen dataclasses.

Both dialects are read: the older one (``rope_theta``, ``rope_scaling``, ``torch_dtype``) and the one that
transformers 5 writes (``rope_parameters``, ``dtype``). Every key is *used*, *known to be inert* for a forward
pass, or *known to change the maths and unsupported*; a key that is none of these is an error, because a key
that is skipped in silence gives wrong text without a word.
"""

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

# The families whose configs are read here; jetspec_jax.models has a class for each.
MODEL_TYPES = ("qwen3",)

# Keys of training, of the tokenizer and of transformers' own bookkeeping: no forward pass depends on them.
INERT_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "auto_map",  # names code in the repository, which is never fetched nor run
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

# Keys that change the maths. They are read here only to be refused, unless they hold the one harmless value.
HARMLESS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "hidden_act": ("silu",),
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "tie_encoder_decoder": (None, False),
}

MODEL_KEYS = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "rope_theta",
        "rope_scaling",
        "rope_parameters",
        "use_sliding_window",
        "sliding_window",
        "max_window_layers",
        "layer_types",
    }
)

HEAD_KEYS = frozenset({"block_size", "num_target_layers", "dflash_config"})
DFLASH_KEYS = frozenset(
    {
        "causal_head",
        "causal",
        "mask_token_id",
        "target_layer_ids",
        "target_hidden_size",
        "draft_shift",
    }
)

SUPPORTED_ROPE_TYPES = ("default",)


@dataclass(frozen=True)
class ModelConfig:
    """What the forward pass of a decoder needs to know.

    Attributes:
        model_type: The family, as Hugging Face names it.
        windows: For each layer the sliding window in tokens, or None for full attention.
        rope_theta: Base of the rotary frequencies.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.windows)


@dataclass(frozen=True)
class DraftHeadConfig:
    """A draft head: decoder layers of the target's width plus what it reads of the target.

    Attributes:
        layers: Geometry of the head's own decoder layers.
        block_size: Draft slots, the anchor's included; the head drafts ``block_size - 1`` tokens deep.
        num_target_layers: Depth of the target that the head was trained on.
        tap_layers: Target layers (0-based) whose outputs are the head's taps.
        mask_token_id: Token whose embedding fills the slots after the anchor.
        causal: Whether slot j sees the slots up to j only; otherwise it sees the whole block.
    """

    layers: ModelConfig
    block_size: int
    num_target_layers: int
    tap_layers: tuple[int, ...]
    mask_token_id: int
    causal: bool

    @property
    def depth(self) -> int:
        """Largest depth of a token tree drafted by this head."""
        return self.block_size - 1


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object, naming the file when it is not one.

    Raises:
        ValueError: The file is not a JSON object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # of the JSON, or of its UTF-8
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


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
    _check_model_type(raw, where)
    _check_keys(raw, MODEL_KEYS, ignore_config_keys, where)
    return _model_config(raw, where)


def parse_draft_head_config(
    raw: Mapping[str, Any], *, ignore_config_keys: Collection[str] = (), where: str = "config.json"
) -> DraftHeadConfig:
    """Validates the ``config.json`` of a draft head (the layout of the published JetSpec and DFlash heads).

    Args:
        raw: The parsed JSON.
        ignore_config_keys: Unknown keys that the caller vouches for as having no effect.
        where: What error messages call the file.

    Raises:
        ValueError: As for `parse_model_config`, and for a ``dflash_config`` that makes no head.
    """
    if not is_draft_head(raw):
        raise ValueError(f"{where} has no dflash_config: it is not a draft head; load it with load_target")
    _check_model_type(raw, where)
    _check_keys(raw, MODEL_KEYS | HEAD_KEYS, ignore_config_keys, where)
    dflash = raw["dflash_config"]
    if not isinstance(dflash, Mapping):
        raise ValueError(f"{where}: dflash_config must be an object, not {dflash!r}")
    _refuse_unknown(dflash, DFLASH_KEYS, ignore_config_keys, f"{where}: dflash_config")

    layers = _model_config(raw, where)
    if any(window is not None for window in layers.windows):
        raise ValueError(f"{where}: sliding-window layers in a draft head are not supported")
    block_size = _integer(raw, "block_size", where, least=2)
    num_target_layers = _integer(raw, "num_target_layers", where)
    mask_token_id = _integer(dflash, "mask_token_id", f"{where}: dflash_config", least=0)
    target_hidden_size = dflash.get("target_hidden_size")
    if target_hidden_size not in (None, layers.hidden_size):
        raise ValueError(
            f"{where}: target_hidden_size {target_hidden_size} differs from the head's hidden_size "
            f"{layers.hidden_size}; heads that adapt another hidden size are not supported, because the "
            "target's embeddings enter the head unprojected"
        )
    if dflash.get("draft_shift"):
        raise ValueError(f"{where}: draft_shift is not supported; published heads use it off")
    if {"causal_head", "causal"} <= dflash.keys() and dflash["causal_head"] != dflash["causal"]:
        raise ValueError(f"{where}: dflash_config has causal_head and causal, and they disagree")

    tap_layers = dflash.get("target_layer_ids")
    if tap_layers is None:
        tap_layers = default_tap_layers(layers.num_layers, num_target_layers)
    elif not isinstance(tap_layers, list) or not tap_layers or not all(map(_is_int, tap_layers)):
        raise ValueError(f"{where}: target_layer_ids must be a list of layer indices, not {tap_layers!r}")
    return DraftHeadConfig(
        layers=layers,
        block_size=block_size,
        num_target_layers=num_target_layers,
        tap_layers=tuple(tap_layers),
        mask_token_id=mask_token_id,
        causal=_flag(
            dflash, "causal_head" if "causal_head" in dflash else "causal", f"{where}: dflash_config"
        ),
    )


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
    if wrong:
        raise ValueError("the draft head does not fit the target: " + "; ".join(wrong))


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
            if not all(_is_int(token) and token >= 0 for token in ids):
                raise ValueError(f"eos_token_id must be a token id or a list of them, not {eos!r}")
            return tuple(ids)
    return ()


def _check_model_type(raw: Mapping[str, Any], where: str) -> None:
    model_type = raw.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(f"{where}: unknown model_type {model_type!r}; supported: {', '.join(MODEL_TYPES)}")


def _check_keys(raw: Mapping[str, Any], used: Collection[str], ignored: Collection[str], where: str) -> None:
    for key, harmless in HARMLESS_ONLY.items():
        if key in raw and key not in ignored and raw[key] not in harmless:
            raise ValueError(
                f"{where}: {key}={raw[key]!r} changes the model and is not supported; "
                f"supported: {harmless[-1]!r}"
            )
    _refuse_unknown(raw, {*used, *INERT_KEYS, *HARMLESS_ONLY}, ignored, where)


def _refuse_unknown(
    raw: Mapping[str, Any], known: Collection[str], ignored: Collection[str], where: str
) -> None:
    unknown = sorted(set(raw) - set(known) - set(ignored))
    if unknown:
        raise ValueError(
            f"{where}: unknown keys {unknown}; if none of them changes the model's output, "
            f"pass ignore_config_keys={unknown}"
        )


def _model_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    num_heads = _integer(raw, "num_attention_heads", where)
    num_kv_heads = _integer(raw, "num_key_value_heads", where)
    if num_heads % num_kv_heads:
        raise ValueError(f"{where}: {num_heads} attention heads are no multiple of {num_kv_heads} KV heads")
    head_dim = _integer(raw, "head_dim", where)
    if head_dim % 2:
        raise ValueError(f"{where}: head_dim {head_dim} is odd; rotary embeddings need pairs")
    return ModelConfig(
        model_type=raw["model_type"],
        vocab_size=_integer(raw, "vocab_size", where),
        hidden_size=_integer(raw, "hidden_size", where),
        intermediate_size=_integer(raw, "intermediate_size", where),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(raw, "rms_norm_eps", where),
        rope_theta=_rope_theta(raw, where),
        max_position_embeddings=_integer(raw, "max_position_embeddings", where),
        # transformers leaves the key out of files where it holds the family's default.
        tie_word_embeddings=_flag(raw, "tie_word_embeddings", where),
        windows=_windows(raw, _integer(raw, "num_hidden_layers", where), where),
    )


def _rope_theta(raw: Mapping[str, Any], where: str) -> float:
    """The rotary base from either dialect; a file with neither is refused rather than given a default."""
    found = set()
    for name, rope in (
        ("config", {"rope_theta": raw.get("rope_theta")}),
        ("rope_parameters", raw.get("rope_parameters") or {}),
        ("rope_scaling", raw.get("rope_scaling") or {}),
    ):
        if not isinstance(rope, Mapping):
            raise ValueError(f"{where}: {name} must be an object, not {rope!r}")
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type not in SUPPORTED_ROPE_TYPES:
            raise ValueError(
                f"{where}: unsupported rope type {rope_type!r} in {name}; "
                f"supported: {', '.join(SUPPORTED_ROPE_TYPES)}"
            )
        surplus = sorted(set(rope) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
        if surplus or rope.get("partial_rotary_factor") not in (None, 1.0):
            raise ValueError(f"{where}: unsupported settings {rope!r} in {name}")
        if rope.get("rope_theta") is not None:
            found.add(_positive(rope, "rope_theta", where))
    if not found:
        raise ValueError(f"{where}: neither rope_theta nor rope_parameters.rope_theta is there")
    if len(found) > 1:
        raise ValueError(f"{where}: rope_theta is given twice and differs: {sorted(found)}")
    return found.pop()


def _windows(raw: Mapping[str, Any], num_layers: int, where: str) -> tuple[int | None, ...]:
    """Each layer's window. Qwen3 slides from layer ``max_window_layers`` on, and only if told to."""
    slides = _flag(raw, "use_sliding_window", where)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        if not slides:
            return (None,) * num_layers
        # Both keys must be there: the defaults that another reader would fill in change the maths.
        window = _integer(raw, "sliding_window", where)
        first = _integer(raw, "max_window_layers", where, least=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(layer_types, list):
        raise ValueError(f"{where}: layer_types must be a list, not {layer_types!r}")
    if len(layer_types) != num_layers:
        raise ValueError(f"{where}: {len(layer_types)} layer_types for {num_layers} layers")
    unknown = [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise ValueError(f"{where}: unsupported layer types {unknown} in layer_types")
    if "sliding_attention" not in layer_types:
        return (None,) * num_layers
    if not slides:
        raise ValueError(f"{where}: layer_types has sliding layers, but no sliding window is in use")
    window = _integer(raw, "sliding_window", where)
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _flag(raw: Mapping[str, Any], key: str, where: str) -> bool:
    """A boolean, false when absent; the string "false" must not count as true."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {key} must be true or false, not {value!r}")
    return bool(value)


def _integer(raw: Mapping[str, Any], key: str, where: str, *, least: int = 1) -> int:
    value = raw.get(key)
    if not _is_int(value) or value < least:
        raise ValueError(f"{where}: {key} must be an integer of at least {least}, not {value!r}")
    return value


def _positive(raw: Mapping[str, Any], key: str, where: str) -> float:
    value = raw.get(key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ValueError(f"{where}: {key} must be a positive number, not {value!r}")
    return float(value)
