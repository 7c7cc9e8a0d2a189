"""The ``config.json`` and the initial weights of a draft head."""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from convert.folders import locate
from jetspec_jax.checkpoint.loading import Target, read_draft_head
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.config import (
    DraftHeadConfig,
    SelectorConfig,
    check_head_fits,
    dialect_of,
    parse_draft_head_config,
)
from jetspec_jax.config.head_dialects import SPECULATORS
from jetspec_jax.device.partition import spread
from jetspec_jax.models import Weights, build, quantized_blocks, weights_of
from jetspec_jax.models.quantized import widened
from train.head.config import head_json, trained_with, with_selector
from train.head.engines import published_json
from train.head.recipe import HeadSettings, SelectorSettings


class Beginning(NamedTuple):
    """A head before training.

    Attributes:
        raw: Its ``config.json``.
        config: The parsed ``config.json``.
        weights: The initial weights, float32, including those of a selector that is continued.
        stored: The dtype of the written head. A frozen head is stored without loss.
    """

    raw: dict[str, Any]
    config: DraftHeadConfig
    weights: Weights
    stored: str = "bfloat16"


def begin_head(
    target: Target,
    settings: HeadSettings,
    checkpoint: Source | None,
    seed: int,
    selector: SelectorSettings | None = None,
) -> Beginning:
    """A new head, or a head from a checkpoint.

    Args:
        checkpoint: The checkpoint to start from, if any; read in float32. The head keeps its config,
            including ignored keys.
        seed: Seed of random weights.
        selector: The selector to train with the head; it is added to the config.

    Raises:
        FileNotFoundError: The checkpoint cannot be found.
        ValueError: Settings, checkpoint and target do not fit together.
    """
    check_start(settings, checkpoint, selector)
    if checkpoint is not None:
        config = checkpoint.head_config
        check_head_fits(config, target.config)
        # On one device, also for a sharded target: training places the head itself.
        head = read_draft_head(replace(checkpoint, dtype="float32"))
        weights, raw = head.weights, checkpoint.raw_config
        continues = selector is not None and selector.existing == "continue"
        if not continues:
            weights = {name: part for name, part in weights.items() if name != "selector"}
        if dialect_of(raw) == SPECULATORS:  # the run writes the published layout
            raw = published_json(raw, replace(config, num_target_layers=target.config.num_layers))
        added = None
        if selector is not None:
            added = SelectorConfig(selector.rank, selector.candidates, selector.tail)
        # Scales of the head's errors suit the selector with which they were fitted.
        scales = config.draft_scales if continues or added is config.selector is None else None
        kept = {"draft_scales": raw["dflash_config"]["draft_scales"]} if scales else {}
        raw = with_selector(trained_with(target, raw), added)
        raw["dflash_config"] |= kept
        target_format = raw["dflash_config"].get("target_format", "")
        trained = replace(head.config, target_format=target_format, selector=added, draft_scales=scales)
        frozen = selector is not None and not selector.joint
        return Beginning(raw, trained, weights, _stored(checkpoint) if frozen else "bfloat16")
    raw = head_json(target, settings)
    config = parse_draft_head_config(raw, where="the head")
    weights = random_head(config, seed) if settings.start == "random" else head_of_target(config, target)
    return Beginning(raw, config, weights)


def check_start(settings: HeadSettings, checkpoint: Source | None, selector: SelectorSettings | None) -> None:
    """Checks the settings of an initial head as far as possible without its target.

    Raises:
        FileNotFoundError: The checkpoint cannot be found.
        ValueError: Settings, checkpoint and selector do not fit together.
    """
    if settings.start != "checkpoint":
        if checkpoint is not None:
            raise ValueError(
                f"the recipe's head begins {settings.start!r}, not as {checkpoint.path_or_id}; set "
                "head.start to 'checkpoint'"
            )
        return
    if checkpoint is None:
        raise ValueError("the recipe begins with a checkpoint: name a head with --draft-head")
    named = [name for name, value in vars(settings).items() if name != "start" and value is not None]
    if named:
        raise ValueError(f"a head that starts from a checkpoint keeps its settings; unset {', '.join(named)}")
    config = checkpoint.head_config
    if config.layers.quantization is not None:
        raise ValueError(
            f"{checkpoint.path_or_id} is {config.layers.quantization.format}, and quantised weights "
            "cannot be trained; begin with the unquantised head"
        )
    if wrong := _wrong_selector(config, selector):
        raise ValueError(f"{checkpoint.path_or_id} {wrong}")


def _wrong_selector(config: DraftHeadConfig, settings: SelectorSettings | None) -> str | None:
    """Why a selector cannot be trained with a head, as text after the head's name; None if it can."""
    found = config.selector
    if settings is None:
        if found is None:
            return None
        return (
            f"has a selector, which the recipe does not train: set selector.rank={found.rank}, "
            "selector.existing=continue and selector.joint=true, which trains both (without the last the "
            "selector alone), or begin with the head without it (export --without-selector)"
        )
    if settings.candidates > config.layers.vocab_size:
        return (
            f"has a vocabulary of {config.layers.vocab_size} tokens, and selector.candidates must be at most "
            f"that, not {settings.candidates}"
        )
    if found is None:
        if settings.existing == "refuse":
            return None
        return f"has no selector to {settings.existing}; leave selector.existing out"
    if settings.existing == "refuse":
        return (
            f"has a selector already, of rank {found.rank}: set selector.existing to 'continue' or "
            "'replace', and selector.joint=true to train the head too"
        )
    given = {"rank": settings.rank, "candidates": settings.candidates, "tail": settings.tail}
    differing = [
        f"{key} is {value}, not {given[key]}" for key, value in asdict(found).items() if value != given[key]
    ]
    if settings.existing == "replace" or not differing:
        return None
    return f"has a selector that cannot be continued with other settings: {'; '.join(differing)}"


def _stored(checkpoint: Source) -> str:
    """The dtype that stores a head without loss: bfloat16 if all its tensors are bfloat16, else float32."""
    found = locate(checkpoint.path_or_id, ignore_config_keys=checkpoint.ignore_config_keys)
    types = {parameter.dtype for parameter in found.opened().values()}
    return "bfloat16" if types == {np.dtype(jnp.bfloat16)} else "float32"


def random_head(config: DraftHeadConfig, seed: int) -> Weights:
    """Random float32 weights with a standard deviation of 0.02."""
    return weights_of(build(config, rngs=nnx.Rngs(seed)))


def head_of_target(config: DraftHeadConfig, target: Target) -> Weights:
    """Initial weights copied from evenly spaced layers of the target, including its last layer.

    The projection averages the taps, so the head's context features are close to those layers' inputs. Norms
    of queries and keys that the target lacks are ones; biases of its attention are left out.

    Raises:
        ValueError: The head's layers have other shapes than the target's, or the head has more layers.
    """
    count, depth = config.layers.num_layers, target.config.num_layers
    if count > depth:
        raise ValueError(f"a head of {count} layers cannot begin as the {depth} of the target")
    random = random_head(config, 0)
    chosen = [(i + 1) * depth // count - 1 for i in range(count)]
    width, taps = config.layers.hidden_size, len(config.tap_layers)
    given = {
        **random,  # keeps the feature norm, all ones
        "layers": {
            i: _as_qwen3(_whole_layer(target, layer), random["layers"][i]) for i, layer in enumerate(chosen)
        },
        "norm": jax.tree.map(np.asarray, target.weights["norm"]),
        "fc": jnp.tile(jnp.eye(width, dtype=jnp.float32) / taps, (taps, 1)),
    }
    expected, found = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (random, given)
    )
    wrong = [f"no {name}" for name in expected if name not in found]
    wrong += [f"{name}, which the head does not have" for name in found if name not in expected]
    wrong += [
        f"{name} {list(found[name].shape)} for {list(leaf.shape)}"
        for name, leaf in expected.items()
        if name in found and found[name].shape != leaf.shape
    ]
    if wrong:
        raise ValueError(
            f"the target's layers do not fit the head's, which are a dense Qwen3's: {'; '.join(wrong)}; "
            "set head.start to 'random'"
        )
    # Copied, because training donates the weights.
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), given)


def _as_qwen3(layer: Weights, random: Weights) -> Weights:
    """A layer with the norms of queries and keys of a random one, if it has none, and without biases."""
    norms = {name: random["self_attn"][name] for name in ("q_norm", "k_norm")}
    kept = {name: part for name, part in layer["self_attn"].items() if not name.endswith("_bias")}
    return {**layer, "self_attn": {**norms, **kept}}


def _whole_layer(target: Target, number: int) -> Weights:
    """A layer's parameters, unsharded, dequantised and without repeated KV heads."""
    blocks = {path[2:]: block for path, block in quantized_blocks(target.config).items() if path[1] == number}
    if target.mesh is None:
        return widened(target.weights["layers"][number], blocks)
    layer = widened(jax.tree.map(np.asarray, target.weights["layers"][number]), blocks)
    layer = jax.tree.map(np.asarray, layer)
    attention = target.config.layers[number]
    repeats = spread(target.config, target.mesh).layers[number].num_kv_heads // max(attention.num_kv_heads, 1)
    if repeats > 1:
        fused = layer["self_attn"]["qkv_proj"]
        queries = fused[:, :, :-2].reshape(fused.shape[0], attention.num_kv_heads, -1, attention.head_dim)
        layer["self_attn"]["qkv_proj"] = np.concatenate([queries, fused[:, ::repeats, -2:]], axis=2)
    return layer
