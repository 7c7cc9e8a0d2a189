"""How a draft head's ``config.json`` is written for each engine.

| engine | reads causality from | source |
|---|---|---|
| jetspec | ``dflash_config.causal_head`` | the reference implementation; this library reads all |
| vllm | ``is_causal``, else ``dflash_config.causal`` | vLLM 0.33, ``models/qwen3_dflash.py`` |
| sglang | ``is_causal``, if ``layer_types`` is there | SGLang 0.5.23, ``models/dflash.py`` |
| speculators | ``sliding_window_non_causal`` | vLLM 0.33, ``configs/speculators/algos.py`` |

The first three read the same file, which has all of their keys. If its key is missing, an engine raises no
error: the head attends bidirectionally, and few of its tokens are accepted.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from jetspec_jax.config import DraftHeadConfig, dialect_of
from jetspec_jax.config.head_dialects import DFLASH, SPECULATORS

#: The engines by their values of ``--for``.
ENGINES = ("jetspec", "vllm", "sglang", "speculators")
#: The keys of the published layout besides those of the decoder.
_HEAD_KEYS = (
    *("architectures", "block_size", "dflash_config", "draft_vocab_size", "eagle_aux_hidden_state_layer_ids"),
    *("is_causal", "mask_token_id", "num_target_layers", "sample_from_anchor", "target_hidden_size"),
    "target_layer_ids",
)


class Verifier(NamedTuple):
    """The target that a head is exported with.

    Attributes:
        name: The target's folder or hub id; None if unknown.
        architectures: The "architectures" of its ``config.json``.
    """

    name: str | None = None
    architectures: tuple[str, ...] = ()


#: An unknown target.
UNNAMED = Verifier()


def published_json(raw: Mapping[str, Any], config: DraftHeadConfig) -> dict[str, Any]:
    """A head's ``config.json`` in the published layout, with every key by which an engine reads causality.

    Args:
        raw: The head's ``config.json`` in either format; other keys are kept.
        config: The parsed ``raw``. If ``num_target_layers`` is None, the result has no such key.
    """
    if dialect_of(raw) == SPECULATORS:
        raw = {"architectures": ["DFlashDraftModel"], **raw["transformer_layer_config"]}
    depth = config.num_target_layers
    return {
        **raw,
        "is_causal": config.causal,
        "layer_types": ["full_attention"] * config.layers.num_layers,
        "block_size": config.block_size,
        **({} if depth is None else {"num_target_layers": depth}),
        DFLASH: {
            **raw.get(DFLASH, {}),
            "causal": config.causal,
            "causal_head": config.causal,
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.tap_layers),
        },
    }


def speculators_json(
    published: Mapping[str, Any], config: DraftHeadConfig, verifier: Verifier
) -> dict[str, Any]:
    """A head's ``config.json`` in the format of the library speculators, from that of `published_json`."""
    return {
        "architectures": ["DFlashDraftModel"],
        SPECULATORS: "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.depth}],
            "verifier": {"name_or_path": verifier.name, "architectures": list(verifier.architectures)},
        },
        "transformer_layer_config": {key: value for key, value in published.items() if key not in _HEAD_KEYS},
        "block_size": config.block_size,
        "draft_vocab_size": config.layers.vocab_size,
        "target_hidden_size": config.layers.hidden_size,
        # vLLM counts the outputs of layers from 1: 0 is the embedding.
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.tap_layers],
        "mask_token_id": config.mask_token_id,
        # In vLLM the key applies to all layers, sliding or not.
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": False,
        "tie_word_embeddings": False,
    }


def engine_json(
    engine: str, raw: Mapping[str, Any], config: DraftHeadConfig, verifier: Verifier = UNNAMED
) -> dict[str, Any]:
    """A head's ``config.json`` for an engine.

    Args:
        engine: One of `ENGINES`.
        raw: The head's ``config.json`` in either format.
        config: The parsed ``raw``, with ``num_target_layers`` unless the engine is speculators.
        verifier: The target.

    Raises:
        ValueError: There is no such engine, or it cannot express the head; all reasons are listed.
    """
    if engine not in ENGINES:
        raise ValueError(f"unknown engine {engine!r}; heads are exported for {', '.join(ENGINES)}")
    reasons = []
    if engine != "jetspec":
        if not config.scaled_embeddings:
            reasons.append("the head takes unscaled embeddings (scaled_embeddings=False)")
        if config.capped_logits:
            reasons.append("the head's logits go through the target's cap (capped_logits=True)")
        if config.selector is not None:
            rank = config.selector.rank
            reasons.append(
                f"the head has a selector (selector_rank={rank}; --without-selector leaves it out)"
            )
    if reasons:
        raise ValueError(
            f"{engine} cannot express this head: {', and '.join(reasons)}, and it has no such key"
        )
    if engine == "speculators":
        if verifier.name is None:
            verifier = _verifier_of(raw)
        if verifier.name is None:
            raise ValueError("a head for speculators names its target; name it with --model")
        return speculators_json(published_json(raw, config), config, verifier)
    if config.num_target_layers is None:
        raise ValueError(
            f"a head for {engine} holds the target's number of layers, and this head's config does not say "
            "it; name the target with --model"
        )
    return published_json(raw, config)


def _verifier_of(raw: Mapping[str, Any]) -> Verifier:
    """The target named by a config in the speculators format; `UNNAMED` for other configs."""
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return Verifier(verifier.get("name_or_path"), tuple(verifier.get("architectures") or ()))
