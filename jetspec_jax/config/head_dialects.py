"""How the engines write a draft head's settings, read into one record.

Two dialects are read:

* ``dflash_config``: the published heads, and what vLLM and SGLang load. Several keys may hold one setting.
* ``speculators_model_type``: the format of the library speculators, which vLLM loads too. The decoder's keys
  are under ``transformer_layer_config``, and tap layers are counted from 1.

Keys that mean the same must agree, because each engine reads another one of them. Sources, read in November
2026: vLLM 0.33 (``models/qwen3_dflash.py``, ``configs/speculators``), SGLang 0.5.23 (``models/dflash.py``,
``speculative/dflash_utils.py``) and speculators 0.9 (``models/dflash/config.py``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from jetspec_jax.arguments import shown
from jetspec_jax.config.fields import MAX_LAYERS, MAX_SIZE, Fields, is_int
from jetspec_jax.config.geometry import SelectorConfig

#: The key that marks each dialect.
DFLASH, SPECULATORS = "dflash_config", "speculators_model_type"

#: The most draft slots that are read; a tree of 256 nodes could be no deeper than 255.
MAX_BLOCK = 256

T = TypeVar("T")
#: The most candidates that a selector may choose among: it scores all pairs of them at every depth.
MAX_SELECTED = 128

#: A key and the object that may hold it.
Place = tuple[Fields, str]

# Keys that change a head's maths in some engine, with the values that change nothing: of DFlash 2
# (convolutions, scales), of Domino, and of heads that sample from the anchor's slot.
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
# Keys without effect where the others are harmless: the mask token's text beside its id, a window that no
# layer uses, settings of a projector that is not there, and settings of training.
_INERT = (
    *("auf", "emb_dim", "gru_hidden_dim", "lambda_base_decay_ratio", "lambda_base_start", "mask_token"),
    *("max_anchors", "pure_draft_prefix_len", "speculators_version", "swa_window_size"),
)


@dataclass(frozen=True)
class HeadKeys:
    """A draft head's settings from either dialect.

    Attributes:
        decoder: The object with the keys of the decoder's layers; its caller says `done`.
        block_size: Draft slots, the anchor's included.
        num_target_layers: Depth of the target; None where the dialect has no key for it.
        tap_layers: Target layers that are tapped, counted from 0; None where the default applies.
        mask_token_id: Token of the slots after the anchor.
        target_hidden_size: The target's width; None where it is the head's.
        draft_vocab_size: Tokens that the head can draft; None where they are the target's.
        causal: Whether a slot sees only the slots up to its own.
        scaled_embeddings: As in `DraftHeadConfig`.
        capped_logits: As in `DraftHeadConfig`.
        target_format: As in `DraftHeadConfig`.
        selector: As in `DraftHeadConfig`.
    """

    decoder: Fields
    block_size: int
    num_target_layers: int | None
    tap_layers: tuple[int, ...] | None
    mask_token_id: int
    target_hidden_size: int | None
    draft_vocab_size: int | None
    causal: bool
    scaled_embeddings: bool = True
    capped_logits: bool = False
    target_format: str = ""
    selector: SelectorConfig | None = None


def read_head_keys(top: Fields) -> HeadKeys:
    """Reads a draft head's settings from the ``config.json`` of either dialect.

    Raises:
        ValueError: A key is missing, out of its range or unknown, changes the maths and is not supported, or
            contradicts another; the message has both keys and their values.
    """
    return _read_speculators(top) if SPECULATORS in top else _read_dflash(top)


def dialect_of(raw: Mapping[str, Any]) -> str:
    """The key that marks a draft head's dialect: `DFLASH` or `SPECULATORS`."""
    return SPECULATORS if raw.get(SPECULATORS) is not None else DFLASH


def causality_by_engine(raw: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the draft slots attend causally, as each engine reads a head's ``config.json``.

    An engine that does not load the dialect is absent. All layers are full attention, as in all heads that
    are read here: sliding layers have other defaults.
    """
    if dialect_of(raw) == SPECULATORS:
        return {"vllm": raw.get("sliding_window_non_causal") is False}
    dflash, explicit = raw[DFLASH], raw.get("is_causal")
    return {
        "jetspec": dflash.get("causal_head") is True,
        "sglang": explicit is True and raw.get("layer_types") is not None,
        "vllm": (dflash.get("causal") if explicit is None else explicit) is True,
    }


def _read_dflash(top: Fields) -> HeadKeys:
    dflash = top.object(DFLASH)
    if dflash is None:
        raise top.error(DFLASH, "an object", None)
    both = (top, dflash)
    taps = [
        (dflash, "target_layer_ids"),
        (top, "target_layer_ids"),
        (top, "eagle_aux_hidden_state_layer_ids"),
    ]
    keys = HeadKeys(
        decoder=top,
        block_size=_agreed(top, _block_size, *((own, "block_size") for own in both)),
        num_target_layers=_agreed(top, _depth, *((own, "num_target_layers") for own in both)),
        tap_layers=_agreed(top, _taps, *taps) if any(key in own for own, key in taps) else None,
        mask_token_id=_agreed(top, _token, *((own, "mask_token_id") for own in (dflash, top))),
        target_hidden_size=_agreed(top, Fields.get, *((own, "target_hidden_size") for own in (dflash, top))),
        draft_vocab_size=top.get("draft_vocab_size"),
        causal=_agreed(top, Fields.flag, (top, "is_causal"), (dflash, "causal"), (dflash, "causal_head")),
        scaled_embeddings=dflash.flag("scaled_embeddings", default=True),
        capped_logits=dflash.flag("capped_logits", default=False),
        target_format=_text(dflash, "target_format"),
        selector=_selector(dflash, top.get("vocab_size")),
    )
    if dflash.get("draft_shift"):
        raise ValueError(f"{top.where}: draft_shift is not supported; published heads use it off")
    _check_harmless(top, dflash)
    _check_no_selector(top)
    dflash.done()
    return keys


def _read_speculators(top: Fields) -> HeadKeys:
    if (kind := top.get(SPECULATORS)) != "dflash":
        raise top.error(SPECULATORS, "'dflash', which is the one kind that is supported", kind)
    decoder = top.object("transformer_layer_config")
    if decoder is None:
        raise top.error("transformer_layer_config", "an object", None)
    # `tie_word_embeddings` of the decoder is nested; vLLM also takes the layers' types and windows from here.
    top.inert("tie_word_embeddings", "sliding_window", "max_window_layers")
    top.only("use_sliding_window", None, False)
    kinds, of_decoder = top.get("layer_types"), decoder.get("layer_types")
    all_full = isinstance(kinds, list) and all(kind == "full_attention" for kind in kinds)
    if kinds not in (None, of_decoder) and not (all_full and of_decoder is None):
        raise ValueError(
            f"{top.where}: {_said(top, top, 'layer_types')} contradicts transformer_layer_config, which has "
            f"layer_types={shown(of_decoder)}"
        )
    keys = HeadKeys(
        decoder=decoder,
        block_size=_block_size(top, "block_size"),
        num_target_layers=None,
        tap_layers=_taps(top, "aux_hidden_state_layer_ids"),
        mask_token_id=_token(top, "mask_token_id"),
        target_hidden_size=top.get("target_hidden_size"),
        draft_vocab_size=top.get("draft_vocab_size"),
        causal=_agreed(top, _causal, (top, "sliding_window_non_causal"), (decoder, "is_causal")),
    )
    _check_proposals(top, keys.block_size)
    _check_harmless(top, decoder)
    _check_no_selector(top, decoder)
    top.done(top=True)
    return keys


def _agreed(top: Fields, read: Callable[[Fields, str], T], *places: Place) -> T:
    """The value that all keys give that are there; without any, what the first one means when it is absent.

    Raises:
        ValueError: Two of them give different values.
    """
    found = [(own, key, read(own, key)) for own, key in places if key in own]
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


def _said(top: Fields, own: Fields, key: str) -> str:
    within = own.where.removeprefix(top.where).removeprefix(": ")
    return f"{within}{within and '.'}{key}={shown(own.raw[key])}"


def _block_size(own: Fields, key: str) -> int:
    return own.integer(key, least=2, most=MAX_BLOCK)


def _depth(own: Fields, key: str) -> int:
    return own.integer(key, most=MAX_LAYERS)


def _text(own: Fields, key: str) -> str:
    found = own.get(key, "")
    if not isinstance(found, str):
        raise own.error(key, "a text", found)
    return found


def _token(own: Fields, key: str) -> int:
    return own.integer(key, least=0)


def _taps(own: Fields, key: str) -> tuple[int, ...]:
    """Tap layers counted from 0; the keys of auxiliary hidden states count from 1."""
    taps = own.get(key)
    if not isinstance(taps, list) or not taps or not all(map(is_int, taps)):
        raise own.error(key, "a list of layer indices", taps)
    first = 0 if key == "target_layer_ids" else 1
    return tuple(tap - first for tap in taps)


def _selector(own: Fields, vocabulary: Any) -> SelectorConfig | None:
    """The selector of the published layout, whose two numbers are 0 or absent in heads that have none.

    Raises:
        ValueError: A key is missing or out of its range; all such keys are listed.
    """
    rank, count = own.get("selector_rank"), own.get("selector_top_k")
    tail = own.get("selector_tail", False)
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
            f"{own.where}: a selector needs selector_rank and selector_top_k: {'; '.join(wrong)}"
        )
    assert is_int(rank)  # for the type checker
    assert is_int(count)
    return SelectorConfig(rank, count, tail)


def _causal(own: Fields, key: str) -> bool:
    """Causality of the dialect speculators by vLLM's rule: without the key all layers are bidirectional."""
    return own.flag(key) if key == "is_causal" else not own.flag(key, default=True)


def _check_proposals(top: Fields, block_size: int) -> None:
    """Checks that no proposal method drafts more tokens than a block has slots after the anchor."""
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
    """Refuses a selector whose keys are anywhere but in `dflash_config`."""
    for own in objects:
        for key in ("selector_rank", "selector_top_k"):
            own.only(key, None, 0, feature=f"a selector's keys are read in {DFLASH} only")


def _check_harmless(*objects: Fields) -> None:
    for own in objects:
        own.inert(*_INERT)
        for key, harmless in _HARMLESS.items():
            if key in own:
                own.only(key, *harmless)
