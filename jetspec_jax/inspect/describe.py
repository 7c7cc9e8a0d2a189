"""Describes a checkpoint: kind, shapes, bytes, and whether a draft head fits a target.

Only the headers of weight files are read, or fetched from the hub.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.cache.ring import ring_pages
from jetspec_jax.checkpoint.hub import find_headers
from jetspec_jax.checkpoint.orbax import check_orbax, is_orbax
from jetspec_jax.checkpoint.packing import holds_mxfp4
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.config import (
    DraftHeadConfig,
    ModelConfig,
    causality_by_engine,
    check_head_fits,
    dialect_of,
    parse_model_config,
)
from jetspec_jax.device.memory import num_parameters, weight_bytes
from jetspec_jax.models import kept_packed


def describe(
    path_or_id: str | Path,
    target: str | Path | None = None,
    *,
    ignore_config_keys: Collection[str] = (),
) -> dict[str, Any]:
    """Describes a target or a draft head as plain data.

    Args:
        path_or_id: A local folder, a GGUF file or a hub id.
        target: For a draft head, the target to hold it against.
        ignore_config_keys: Unknown keys of either ``config.json`` that the caller vouches for.

    Raises:
        FileNotFoundError: The checkpoint cannot be found or fetched.
        ValueError: It is not valid, or ``target`` was given for something that is no head.
    """
    source = Source(path_or_id, ignore_config_keys=ignore_config_keys)
    folder, config = source.config_folder, source.config
    if isinstance(config, DraftHeadConfig):
        kind, model, about_head = "draft head", config.layers, _head(source.raw_config, config)
        fit = {} if target is None else _fit(config, replace(source, path_or_id=target))
    elif target is None:
        kind, model, about_head, fit = "target", config, {}, {}
    else:
        raise ValueError(f"{folder} is a target, not a draft head: there is nothing to fit to {target}")
    return {
        "kind": kind,
        "path": str(folder),
        **about_head,
        **_model(source.raw_config, model),
        **_quantization(model),
        **_weights(path_or_id, folder, config),
        **fit,
    }


def _head(raw: Mapping[str, Any], config: DraftHeadConfig) -> dict[str, Any]:
    readings = causality_by_engine(raw).items()
    return {
        "dialect": dialect_of(raw),
        "causality_read_by": [engine for engine, causal in readings if causal == config.causal],
        "block_size": config.block_size,
        "causal": config.causal,
        "tap_layers": list(config.tap_layers),
        "mask_token_id": config.mask_token_id,
        "num_target_layers": config.num_target_layers,
        "scaled_embeddings": config.scaled_embeddings,
        "capped_logits": config.capped_logits,
        "selector": None if config.selector is None else asdict(config.selector),
        **({"target_format": config.target_format} if config.target_format else {}),
        **({"draft_scales": config.draft_scales} if config.draft_scales else {}),
    }


def _fit(head: DraftHeadConfig, target: Source) -> dict[str, Any]:
    # A file that cannot be read is an error; one that no supported target has, a misfit.
    path, raw, problem = target.config_path, target.raw_config, None
    try:
        config = parse_model_config(raw, ignore_config_keys=target.ignore_config_keys, where=str(path))
        check_head_fits(head, config)
    except ValueError as error:
        problem = str(error)
    return {"target": str(target.config_folder), "fits": problem is None, "fit_problem": problem}


def _model(raw: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
    def of_layers(values: Iterable[Any]) -> Any:
        """The one value of all layers, or the several."""
        found = list(dict.fromkeys(values))
        return found[0] if len(found) == 1 else found

    layers = config.layers
    # A recurrent layer has no heads of attention.
    attention = [layer for layer in layers if layer.recurrence is None]
    experts = [layer.experts for layer in layers]
    # A model of several modalities has another type than its text model; a nested config has none.
    types = {"model_type": raw.get("model_type", config.model_type)}
    if config.model_type != types["model_type"]:
        types["text_model_type"] = config.model_type
    return {
        **types,
        "layers": config.num_layers,
        "recurrent_layers": config.num_layers - len(attention),
        "hidden_size": config.hidden_size,
        "intermediate_size": of_layers(layer.mlp_size for layer in layers),
        "experts": of_layers(layer.count if layer else 0 for layer in experts),
        "experts_per_token": of_layers(layer.routing.top_k if layer else 0 for layer in experts),
        "expert_size": of_layers(layer.size if layer else 0 for layer in experts),
        "heads": of_layers(layer.num_heads for layer in attention),
        "kv_heads": of_layers(layer.num_kv_heads for layer in attention),
        "head_dim": of_layers(layer.head_dim for layer in attention),
        "vocab_size": config.vocab_size,
        "context_limit": config.max_position_embeddings,
        "rope_theta": of_layers(layer.rope.theta for layer in attention),
        "sliding_windows": sorted({w for w in config.windows if w is not None}),
        "tied_embeddings": config.tie_word_embeddings,
        "cache_bytes_per_token_bf16": 2 * sum(layer.kv_size for layer in layers if layer.window is None),
        # A slot keeps as much as its windows reach over, however long it is.
        "cache_bytes_of_windows_bf16": 2
        * sum(
            layer.kv_size * PAGE_SIZE * ring_pages(layer.window, PAGE_SIZE)
            for layer in layers
            if layer.window is not None
        ),
        # Likewise what recurrent layers keep.
        "state_bytes_per_slot_bf16": sum(
            layer.recurrence.slot_bytes(2) for layer in layers if layer.recurrence is not None
        ),
    }


def _quantization(config: ModelConfig) -> dict[str, Any]:
    """How weights are quantised, if they are, and what of the config is not done."""
    quantization = config.quantization
    if quantization is None:
        return {}
    given = quantization.activations
    text = {"none": "not quantised"}.get(given, f"not supported by fp8_activations: {given}")
    if given in ("dynamic", "static"):
        text = f"quantised in 16-bit types, see fp8_activations; the config has {given}"
    return {"quantization": quantization.format, "activations": text}


def _weights(path_or_id: str | Path, folder: Path, config: ModelConfig | DraftHeadConfig) -> dict[str, Any]:
    bfloat16, packed = jnp.dtype(jnp.bfloat16), {}
    if is_orbax(folder):
        file_bytes, unused = check_orbax(folder, config), {}
    else:
        headers = find_headers(path_or_id, folder)
        file_bytes, unused = headers.file_bytes, headers.plan(config).unused
        if isinstance(config, ModelConfig) and holds_mxfp4(config, lambda: headers):
            with_packed = kept_packed(config)
            packed = {**_quantization(with_packed), "weight_bytes_mxfp4": weight_bytes(with_packed, bfloat16)}
    return {
        "parameters": num_parameters(config),
        # What a device takes: of experts in MXFP4 where they are widened, and where they stay packed.
        "weight_bytes_bf16": weight_bytes(config, bfloat16),
        **packed,
        "file_bytes": file_bytes,
        "unused_tensors": {reason: len(names) for reason, names in unused.items()},
    }
