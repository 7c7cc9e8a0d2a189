"""The beginning of a draft head: its ``config.json`` and its first weights."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jetspec_jax.checkpoint.loading import Target, read_draft_head
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.config import DraftHeadConfig, check_head_fits, dialect_of, parse_draft_head_config
from jetspec_jax.config.head_dialects import SPECULATORS
from jetspec_jax.device.partition import spread
from jetspec_jax.models import Weights, build, quantized_blocks, weights_of
from jetspec_jax.models.quantized import widened
from train.head.config import head_json, trained_with
from train.head.engines import published_json
from train.head.recipe import HeadSettings


class Beginning(NamedTuple):
    """A head before its training.

    Attributes:
        raw: Its ``config.json``.
        config: The parsed ``config.json``.
        weights: Its first weights, float32.
    """

    raw: dict[str, Any]
    config: DraftHeadConfig
    weights: Weights


def begin_head(target: Target, settings: HeadSettings, checkpoint: Source | None, seed: int) -> Beginning:
    """A new head, or the one of a checkpoint.

    Args:
        target: The head's target.
        settings: The head's settings.
        checkpoint: For a head that begins as one, which keeps its config, ignored keys too; read in float32.
        seed: Seed of random weights.

    Raises:
        FileNotFoundError: The checkpoint cannot be found.
        ValueError: Settings, checkpoint and target do not fit together.
    """
    if settings.start == "checkpoint":
        if checkpoint is None:
            raise ValueError("the recipe begins with a checkpoint: name a head with --draft-head")
        named = [name for name, value in vars(settings).items() if name != "start" and value is not None]
        if named:
            raise ValueError(f"a head that begins as a checkpoint is what that is; unset {', '.join(named)}")
        config = checkpoint.head_config
        check_head_fits(config, target.config)
        if config.layers.quantization is not None:
            raise ValueError(
                f"{checkpoint.path_or_id} is {config.layers.quantization.format}, and quantised weights "
                "cannot be trained; begin with the head that it was made of"
            )
        if config.selector is not None:
            raise ValueError(
                f"{checkpoint.path_or_id} has a selector, and no loss here trains it with its head; begin "
                "with the head without it"
            )
        # On one device whatever the target's are: training lays the head out in its own way.
        head = read_draft_head(replace(checkpoint, dtype="float32"))
        raw = checkpoint.raw_config
        if dialect_of(raw) == SPECULATORS:  # the run writes the published layout
            raw = published_json(raw, replace(config, num_target_layers=target.config.num_layers))
        raw = trained_with(target, raw)
        trained = replace(head.config, target_format=raw["dflash_config"].get("target_format", ""))
        return Beginning(raw, trained, head.weights)
    if checkpoint is not None:
        raise ValueError(
            f"the recipe's head begins {settings.start!r}, not as {checkpoint.path_or_id}; set head.start to "
            "'checkpoint'"
        )
    raw = head_json(target, settings)
    config = parse_draft_head_config(raw, where="the head")
    weights = random_head(config, seed) if settings.start == "random" else head_of_target(config, target)
    return Beginning(raw, config, weights)


def random_head(config: DraftHeadConfig, seed: int) -> Weights:
    """Random float32 weights with a standard deviation of 0.02."""
    return weights_of(build(config, rngs=nnx.Rngs(seed)))


def head_of_target(config: DraftHeadConfig, target: Target) -> Weights:
    """Evenly spread layers of the target, its last one included, after a projection that averages the taps.

    The head's context features are then close to the inputs of those layers in the target.

    Raises:
        ValueError: The head's layers have other shapes than the target's, or are more.
    """
    count, depth = config.layers.num_layers, target.config.num_layers
    if count > depth:
        raise ValueError(f"a head of {count} layers cannot begin as the {depth} of the target")
    random = random_head(config, 0)
    chosen = [(i + 1) * depth // count - 1 for i in range(count)]
    width, taps = config.layers.hidden_size, len(config.tap_layers)
    given = {
        **random,  # keeps the norm of the features, which is all ones
        "layers": {i: _whole_layer(target, layer) for i, layer in enumerate(chosen)},
        "norm": jax.tree.map(np.asarray, target.weights["norm"]),
        "fc": jnp.tile(jnp.eye(width, dtype=jnp.float32) / taps, (taps, 1)),
    }
    wanted, found = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (random, given)
    )
    wrong = [f"no {name}" for name in wanted if name not in found]
    wrong += [f"{name}, which the head has not" for name in found if name not in wanted]
    wrong += [
        f"{name} {list(found[name].shape)} for {list(leaf.shape)}"
        for name, leaf in wanted.items()
        if name in found and found[name].shape != leaf.shape
    ]
    if wrong:
        raise ValueError(
            f"the target's layers do not fit the head's, which are a dense Qwen3's: {'; '.join(wrong)}; "
            "set head.start to 'random'"
        )
    # Copied, because training donates the weights.
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), given)


def _whole_layer(target: Target, number: int) -> Weights:
    """A layer's parameters, whole on one device, with no KV head repeated and nothing quantised."""
    blocks = {path[2:]: own for path, own in quantized_blocks(target.config).items() if path[1] == number}
    if target.mesh is None:
        return widened(target.weights["layers"][number], blocks)
    layer = widened(jax.tree.map(np.asarray, target.weights["layers"][number]), blocks)
    layer = jax.tree.map(np.asarray, layer)
    own = target.config.layers[number]
    repeats = spread(target.config, target.mesh).layers[number].num_kv_heads // max(own.num_kv_heads, 1)
    if repeats > 1:
        fused = layer["self_attn"]["qkv_proj"]
        queries = fused[:, :, :-2].reshape(fused.shape[0], own.num_kv_heads, -1, own.head_dim)
        layer["self_attn"]["qkv_proj"] = np.concatenate([queries, fused[:, ::repeats, -2:]], axis=2)
    return layer
