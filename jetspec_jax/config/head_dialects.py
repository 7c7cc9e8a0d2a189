"""A draft head's settings, read from either of two dialects into one record.

* ``dflash_config``: the format of the published heads, which vLLM and SGLang load. Several keys may hold the
  same setting.
* ``speculators_model_type``: the format of the library speculators, which vLLM loads too. The decoder's keys
  are under ``transformer_layer_config``, and tap layers are counted from 1.

Keys with the same meaning must agree, because engines read different ones. Sources, read in November 2026:
vLLM 0.33 (``models/qwen3_dflash.py``, ``configs/speculators``), SGLang 0.5.23 (``models/dflash.py``,
``speculative/dflash_utils.py``) and speculators 0.9 (``models/dflash/config.py``).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jetspec_jax.arguments import shown
from jetspec_jax.config.fields import MAX_LAYERS, MAX_SIZE, Fields, is_int
from jetspec_jax.config.geometry import SCALE_BANDS, DraftScales, SelectorConfig

#: The key that marks each dialect.
DFLASH, SPECULATORS = "dflash_config", "speculators_model_type"

#: The largest supported block: a tree of 256 nodes is at most 255 deep.
MAX_BLOCK = 256

T = TypeVar("T")
#: The most candidates of a selector, which scores all pairs of them at every depth.
MAX_SELECTED = 128

#: A key and the object that may hold it.
Place = tuple[Fields, str]

# Keys that change a head's maths in some engine, with the values that do not: from DFlash 2 (convolutions,
# scales), from Domino, and from heads that sample from the anchor's slot.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "conv_group_size": (None, 0),
    "conv_kernel_size": (None, 0),
    "final_logit_softcapping": (None, 0.0),
    "input_embedding_scale": (None, 1.0),
    "is_neox_style": (None, True),
    "logit_scale": (None, 1.0),
    "output_multiplier": (None, 1.0),
    "projector_type": (None, "dflash"),
    "rope_is_neox_style": (None, True),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
    "use_aux_hidden_state": (None, True),
    "use_swa": (None, False),
}
# Keys without effect if `_HARMLESS` holds: the mask token's text beside its id, a window that no layer uses,
# settings of an absent projector, and training settings.
_INERT = (
    *("auf", "emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start", "mask_token"),
    *("max_anchors", "pure_draft_prefix_len", "speculators_version", "swa_window_size"),
)


def read_head_keys(top: Fields) -> tuple[Fields, dict[str, Any]]:
    """Reads a draft head's settings from the ``config.json`` of either dialect.

    Returns the object with the decoder's keys, on which the caller must call `done`, and arguments of
    `DraftHeadConfig`; also "target_hidden_size" (None if it equals the head's) and "draft_vocab_size" (None
    for the whole vocabulary). Without tap layers the default applies.

    Raises:
        ValueError: A key is missing, out of range, unknown or unsupported, or two keys contradict each other;
            the message has both keys and their values.
    """
    return _read_speculators(top) if SPECULATORS in top else (top, _read_dflash(top))


def dialect_of(raw: Mapping[str, Any]) -> str:
    """The key that marks a draft head's dialect: `DFLASH` or `SPECULATORS`."""
    return SPECULATORS if raw.get(SPECULATORS) is not None else DFLASH


def causality_by_engine(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the draft slots attend causally, as each engine reads a head's ``config.json``.

    Engines that do not load the dialect are absent. Valid for heads with full attention only, as all heads
    here; sliding layers have other defaults.
    """
    if dialect_of(raw) == SPECULATORS:
        return {"vllm": raw.get("sliding_window_non_causal") is False}
    dflash, explicit = raw[DFLASH], raw.get("is_causal")
    return {
        "jetspec": dflash.get("causal_head") is True,
        "sglang": explicit is True and raw.get("layer_types") is not None,
        "vllm": (dflash.get("causal") if explicit is None else explicit) is True,
    }


def _read_dflash(top: Fields) -> dict[str, Any]:
    dflash = top.object(DFLASH)
    if dflash is None:
        raise top.error(DFLASH, "an object", None)
    both = (top, dflash)
    taps = [
        (dflash, "target_layer_ids"),
        (top, "target_layer_ids"),
        (top, "eagle_aux_hidden_state_layer_ids"),
    ]
    block_size = _agreed(top, _block_size, *((fields, "block_size") for fields in both))
    keys = {
        "block_size": block_size,
        "num_target_layers": _agreed(top, _depth, *((fields, "num_target_layers") for fields in both)),
        "tap_layers": _agreed(top, _taps, *taps) if any(key in fields for fields, key in taps) else None,
        "mask_token_id": _agreed(top, _token, (dflash, "mask_token_id"), (top, "mask_token_id")),
        "target_hidden_size": _agreed(
            top, Fields.get, *((fields, "target_hidden_size") for fields in (dflash, top))
        ),
        "draft_vocab_size": top.get("draft_vocab_size"),
        "causal": _agreed(top, Fields.flag, (top, "is_causal"), (dflash, "causal"), (dflash, "causal_head")),
        "scaled_embeddings": dflash.flag("scaled_embeddings", default=True),
        "capped_logits": dflash.flag("capped_logits", default=False),
        "target_format": _text(dflash, "target_format"),
        "selector": _selector(dflash, top.get("vocab_size")),
        "draft_scales": _draft_scales(dflash, block_size - 1),
    }
    if dflash.get("draft_shift"):
        raise ValueError(f"{top.where}: draft_shift is not supported; published heads use it off")
    _check_harmless(top, dflash)
    _check_no_selector(top)
    dflash.done()
    return keys


def _read_speculators(top: Fields) -> tuple[Fields, dict[str, Any]]:
    if (kind := top.get(SPECULATORS)) != "dflash":
        raise top.error(SPECULATORS, "'dflash', which is the one kind that is supported", kind)
    decoder = top.object("transformer_layer_config")
    if decoder is None:
        raise top.error("transformer_layer_config", "an object", None)
    # `tie_word_embeddings` is read from the decoder's object. vLLM reads layer types and windows from here.
    top.inert("tie_word_embeddings", "sliding_window", "max_window_layers")
    top.only("use_sliding_window", None, False)
    kinds, of_decoder = top.get("layer_types"), decoder.get("layer_types")
    all_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if kinds not in (None, of_decoder) and not (all_full and of_decoder is None):
        raise ValueError(
            f"{top.where}: {_said(top, top, 'layer_types')} contradicts transformer_layer_config, which has "
            f"layer_types={shown(of_decoder)}"
        )
    keys = {
        "block_size": _block_size(top, "block_size"),
        "num_target_layers": None,
        "tap_layers": _taps(top, "aux_hidden_state_layer_ids"),
        "mask_token_id": _token(top, "mask_token_id"),
        "target_hidden_size": top.get("target_hidden_size"),
        "draft_vocab_size": top.get("draft_vocab_size"),
        "causal": _agreed(top, _causal, (top, "sliding_window_non_causal"), (decoder, "is_causal")),
    }
    _check_proposals(top, keys["block_size"])
    _check_harmless(top, decoder)
    _check_no_selector(top, decoder)
    top.done(top=True)
    return decoder, keys


def _agreed(top: Fields, read: Callable[[Fields, str], T], *places: Place) -> T:
    """The value on which all present keys agree; if all are absent, the first key's default."""
    found = [(fields, key, read(fields, key)) for fields, key in places if key in fields]
    if not found:
        return read(*places[0])
    first, key, value = found[0]
    for other, other_key, other_value in found[1:]:
        if other_value != value:
            raise ValueError(
                f"{top.where}: {_said(top, first, key)} contradicts {_said(top, other, other_key)}; each "
                "engine reads another of these keys, so correct the wrong one or remove it"
            )
    return value


def _said(top: Fields, fields: Fields, key: str) -> str:
    within = fields.where.removeprefix(top.where).removeprefix(": ")
    return f"{within}{within and '.'}{key}={shown(fields.raw[key])}"


_block_size = functools.partial(Fields.integer, least=2, most=MAX_BLOCK)
_depth = functools.partial(Fields.integer, most=MAX_LAYERS)
_token = functools.partial(Fields.integer, least=0)


def _text(fields: Fields, key: str) -> str:
    found = fields.get(key, "")
    if not isinstance(found, str):
        raise fields.error(key, "a text", found)
    return found


def _taps(fields: Fields, key: str) -> tuple[int, ...]:
    """Tap layers counted from 0; the keys of auxiliary hidden states count from 1."""
    taps = fields.get(key)
    if not isinstance(taps, list) or not taps or not all(map(is_int, taps)):
        raise fields.error(key, "a list of layer indices", taps)
    first = 0 if key == "target_layer_ids" else 1
    return tuple(tap - first for tap in taps)


def _selector(fields: Fields, vocabulary: Any) -> SelectorConfig | None:
    """The selector; None if both of its numbers are 0 or absent."""
    rank, count = fields.get("selector_rank"), fields.get("selector_top_k")
    tail = fields.get("selector_tail", False)
    if rank in (None, 0) and count in (None, 0) and tail is False:
        return None
    most = min(vocabulary, MAX_SELECTED) if is_int(vocabulary) else MAX_SELECTED
    wrong = [
        f"{key} must be an integer in 1..{limit}, not {shown(value)}"
        for key, value, limit in (("selector_rank", rank, MAX_SIZE), ("selector_top_k", count, most))
        if not is_int(value) or not 1 <= value <= limit
    ]
    if not isinstance(tail, bool):
        wrong.append(f"selector_tail must be true or false, not {shown(tail)}")
    if wrong:
        raise ValueError(
            f"{fields.where}: a selector needs selector_rank and selector_top_k: {'; '.join(wrong)}"
        )
    assert is_int(rank)  # for the type checker
    assert is_int(count)
    return SelectorConfig(rank, count, tail)


def _draft_scales(fields: Fields, depth: int) -> DraftScales | None:
    """The scale of each depth, or of each band and depth; noise over any of them is finite."""
    scales = fields.get("draft_scales")
    if scales is None:
        return None
    bands = 1 + len(SCALE_BANDS)
    banded = isinstance(scales, list) and len(scales) == bands and isinstance(scales[0], list)
    rows = scales if banded else [scales]
    # Booleans are integers to Python; NaN compares false.
    if not all(
        isinstance(row, list)
        and len(row) == depth
        and all(type(scale) in (int, float) and 1e-3 <= scale <= 1e3 for scale in row)
        for row in rows
    ):
        wanted = f"a list of block_size - 1 = {depth} numbers from 0.001 to 1000, or {bands} such lists"
        raise fields.error("draft_scales", wanted, scales)
    found = tuple(tuple(map(float, row)) for row in rows)
    return found if banded else found[0]


def _causal(fields: Fields, key: str) -> bool:
    """Causality in the speculators dialect; as in vLLM, layers are bidirectional by default."""
    return fields.flag(key) if key == "is_causal" else not fields.flag(key, default=True)


def _check_proposals(top: Fields, block_size: int) -> None:
    """Checks that proposal methods draft at most as many tokens as there are slots after the anchor."""
    config = top.get("speculators_config")
    methods = config.get("proposal_methods") if isinstance(config, Mapping) else None
    for method in methods if isinstance(methods, list) else []:
        tokens = method.get("speculative_tokens") if isinstance(method, Mapping) else None
        if tokens is not None and (not is_int(tokens) or not 1 <= tokens < block_size):
            raise ValueError(
                f"{top.where}: speculators_config.proposal_methods has speculative_tokens={shown(tokens)}, "
                f"and block_size={block_size} leaves 1 to {block_size - 1} slots after the anchor"
            )


def _check_no_selector(*objects: Fields) -> None:
    for fields in objects:
        for key in ("selector_rank", "selector_top_k"):
            fields.only(key, None, 0, feature=f"a selector's keys are read in {DFLASH} only")


def _check_harmless(*objects: Fields) -> None:
    for fields in objects:
        fields.inert(*_INERT)
        for key, harmless in _HARMLESS.items():
            if key in fields:
                fields.only(key, *harmless)
