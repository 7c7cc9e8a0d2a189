"""Computes a model's outputs from given weights and fixed inputs.

The outputs are a target's logits of random tokens, a draft head's draft logits with a target, or a head's
hidden states of random slots after random taps. They are computed in float32 and layer by layer: a program of
the whole model would hold all weights in float32, and a target may be larger than the memory.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from convert.folders import Checkpoint
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import Store, empty_stores
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.proposer import DraftHeadProposer
from jetspec_jax.models import Transformer, Weights, abstract, bind
from jetspec_jax.models.transformer import ForwardOutput

# Tokens of the input sequence; fewer if the model's context is shorter.
TOKENS = 32


def _on_device(weights: Weights) -> Weights:
    """Converts weights, read or unread, to JAX arrays one at a time: memory holds only one of them twice."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), weights)


def outputs_of(checkpoint: Checkpoint, target: Checkpoint | None) -> Callable[[Weights], np.ndarray]:
    """The outputs as a function of the weights, which may be unread.

    Args:
        checkpoint: The checkpoint, whose config decides the outputs.
        target: A draft head's target, or None.
    """
    config = checkpoint.config
    if not isinstance(config, DraftHeadConfig):
        return lambda weights: _logits(config, weights)
    if target is None:
        return lambda weights: _hidden_states(config, weights)
    assert isinstance(target.config, ModelConfig)  # see check_target
    tokens = fixed_tokens(target.config)
    module = in_float32(target.config, nnx.traversals.unflatten_mapping(target.opened()))
    taps = forward(module, tokens, config.tap_layers).taps
    # The anchor follows the tapped tokens; it may be any token.
    return lambda weights: _draft_logits(config, weights, module, taps, tokens[:, 0])


def _logits(config: ModelConfig, weights: Weights) -> np.ndarray:
    module = in_float32(config, weights)
    return np.asarray(module.logits(forward(module, fixed_tokens(config)).hidden))


def _draft_logits(
    config: DraftHeadConfig,
    weights: Weights,
    target: Transformer,
    taps: Float[Array, "1 T F"],
    anchor: Int[Array, "1"],
) -> np.ndarray:
    """Draft logits after tapped tokens, computed as in decoding."""
    proposer, weights = DraftHeadProposer(config), _on_device(weights)
    context, slots = _context(config, weights, taps)
    return np.asarray(proposer.propose(weights, context, target, anchor, slots))


def _hidden_states(config: DraftHeadConfig, weights: Weights) -> np.ndarray:
    """A head's final hidden states for random draft slots after random taps."""
    rng = np.random.default_rng(0)
    size = config.layers.hidden_size
    taps = rng.standard_normal((1, TOKENS, len(config.tap_layers) * size), np.float32)
    inputs = rng.standard_normal((1, config.block_size, size), np.float32)
    weights = _on_device(weights)
    context, slots = _context(config, weights, jnp.asarray(taps))
    block = Block.chain(jnp.zeros(inputs.shape[:2], jnp.int32), "chain" if config.causal else "full")
    attend = attend_over(context, slots, block)
    return np.asarray(bind(config, weights)(jnp.asarray(inputs), block.positions(slots.lengths), attend))


def _context(
    config: DraftHeadConfig, weights: Weights, taps: Float[Array, "1 T F"]
) -> tuple[tuple[Store, ...], Slots]:
    """The head's stores for one sequence of tapped tokens, in one page."""
    tokens = taps.shape[1]
    empty = empty_stores(config.layers, 1, tokens, taps.dtype)
    slots = Slots.of(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    count = jnp.full(1, tokens, jnp.int32)
    context = DraftHeadProposer(config).commit(weights, empty, taps, slots, count)
    return context, slots._replace(lengths=count)


def in_float32(config: ModelConfig, weights: Weights) -> Transformer:
    """A target that computes in float32 with weights of any type: modules use the embedding's type.

    float16 would overflow in some models; bfloat16 would hide small differences, and is slow on CPUs. Unread
    layers are read when they run.
    """
    ends = _on_device({name: tensor for name, tensor in weights.items() if name != "layers"})
    ends["embed_tokens"] = ends["embed_tokens"].astype(jnp.float32)
    module = abstract(config)
    layers = [
        functools.partial(_run_layer, layer, weights["layers"][i]) for i, layer in enumerate(module.layers)
    ]
    graph, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, ends)
    module = nnx.merge(graph, state)
    assert isinstance(module, Transformer)
    vars(module)["layers"] = layers
    return module


def _run_layer(layer: nnx.Module, weights: Weights, *inputs: Any) -> Any:
    """Reads a layer's weights, runs the layer and waits: Python would otherwise read all layers at once."""
    graph, state = nnx.split(layer)
    nnx.replace_by_pure_dict(state, _on_device(weights))
    return jax.block_until_ready(nnx.merge(graph, state)(*inputs))


def forward(target: Transformer, tokens: Int[Array, "1 T"], taps: tuple[int, ...] = ()) -> ForwardOutput:
    """A target's forward over one sequence."""
    block = Block.chain(tokens)
    return target(tokens, block.depths, attend_over(None, None, block), taps=taps)


def fixed_tokens(config: ModelConfig) -> Int[Array, "1 T"]:
    """Random token ids, equal for all models with the same vocabulary size."""
    count = min(TOKENS, config.max_position_embeddings)
    return jnp.asarray(np.random.default_rng(0).integers(config.vocab_size, size=(1, count)), jnp.int32)
