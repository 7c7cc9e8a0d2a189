"""How a draft head begins: its ``config.json`` and its first weights."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.checkpoint.loading import Target, read_draft_head
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.config import DraftHeadConfig, parse_draft_head_config
from jetspec_jax.models import Weights, build, weights_of
from train.head.config import head_json
from train.head.recipe import HeadShape


class Beginning(NamedTuple):
    """A head before its training.

    Attributes:
        raw: Its ``config.json``.
        config: The same, read.
        weights: float32.
    """

    raw: dict[str, Any]
    config: DraftHeadConfig
    weights: Weights


def begin_head(target: Target, shape: HeadShape, checkpoint: Source | None, seed: int) -> Beginning:
    """A new head, or the one of a checkpoint.

    Args:
        target: Whose head it is.
        shape: What it is, and where it begins.
        checkpoint: For a head that begins as one, which keeps its config, ignored keys too; read in float32.
        seed: Of random weights.

    Raises:
        FileNotFoundError: The checkpoint is not to be had.
        ValueError: Shape, checkpoint and target do not go together.
    """
    if shape.start == "checkpoint":
        if checkpoint is None:
            raise ValueError("the recipe begins with a checkpoint: name a head with --draft-head")
        named = [name for name, value in vars(shape).items() if name != "start" and value is not None]
        if named:
            raise ValueError(f"a head that begins as a checkpoint is what that is; unset {', '.join(named)}")
        head = read_draft_head(replace(checkpoint, dtype="float32"), target)
        return Beginning(checkpoint.raw_config, head.config, head.weights)
    if checkpoint is not None:
        raise ValueError(
            f"the recipe's head begins {shape.start!r}, not as {checkpoint.path_or_id}; set head.start to "
            "'checkpoint'"
        )
    raw = head_json(target, shape)
    config = parse_draft_head_config(raw, where="the head")
    weights = random_head(config, seed) if shape.start == "random" else head_of_target(config, target)
    return Beginning(raw, config, weights)


def random_head(config: DraftHeadConfig, seed: int) -> Weights:
    """Random float32 weights, of deviation 0.02."""
    return weights_of(build(config, rngs=nnx.Rngs(seed)))


def head_of_target(config: DraftHeadConfig, target: Target) -> Weights:
    """The target's own layers, spread evenly and ending with its last, behind the mean of the taps.

    The head's context features are then close to what those layers read in the target.

    Raises:
        ValueError: The head's layers are not shaped as the target's, or are more.
    """
    count, depth = config.layers.num_layers, target.config.num_layers
    if count > depth:
        raise ValueError(f"a head of {count} layers cannot begin as the {depth} of the target")
    random = random_head(config, 0)
    chosen = [(i + 1) * depth // count - 1 for i in range(count)]
    width, taps = config.layers.hidden_size, len(config.tap_layers)
    given = {
        **random,  # leaves the norm of the features at ones
        "layers": {i: target.weights["layers"][layer] for i, layer in enumerate(chosen)},
        "norm": target.weights["norm"],
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
    # Copies: training uses weights up.
    return jax.tree.map(lambda leaf: jnp.array(leaf, jnp.float32), given)
