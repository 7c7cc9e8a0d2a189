"""What a model computes with given weights, of inputs that are always the same.

A target's logits of random tokens; a draft head's draft logits with a target, or without one its hidden
states of random slots after random taps. In float32, whatever the weights are stored in, and layer by layer:
a program of the whole model would hold all weights in float32 at once, and a target may be larger than the
memory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from jetspec_jax.models.layers import KV, History, Mix
from jetspec_jax.models.transformer import ForwardOutput

# Tokens of the sequence that outputs are computed of; less where the model takes less.
TOKENS = 32


def _on_device(weights: Weights) -> Weights:
    """Makes JAX's arrays one by one of what may be unread, so that memory holds only one of them twice."""
    return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), weights)


def outputs_of(checkpoint: Checkpoint, target: Checkpoint | None) -> Callable[[Weights], np.ndarray]:
    """What is computed with weights of a checkpoint, as a function of the weights, which may be unread.

    Args:
        checkpoint: Whose config the weights have.
        target: For a draft head, the target to draft for, if there is one.
    """
    config = checkpoint.config
    if not isinstance(config, DraftHeadConfig):
        return lambda weights: _logits(config, weights)
    if target is None:
        return lambda weights: _hidden_states(config, weights)
    assert isinstance(target.config, ModelConfig)  # check_target has seen to it
    tokens = fixed_tokens(target.config)
    module = in_float32(target.config, nnx.traversals.unflatten_mapping(target.opened()))
    taps = forward(module, tokens, config.tap_layers).taps
    # The anchor comes after the tapped tokens; any token will do.
    return lambda weights: _draft_logits(config, weights, module, taps, tokens[:, 0])


def _logits(config: ModelConfig, weights: Weights) -> np.ndarray:
    """A target's logits of random tokens."""
    module = in_float32(config, weights)
    return np.asarray(module.logits(forward(module, fixed_tokens(config)).hidden))


def _draft_logits(
    config: DraftHeadConfig,
    weights: Weights,
    target: Transformer,
    taps: Float[Array, "1 T F"],
    anchor: Int[Array, "1"],
) -> np.ndarray:
    """Draft logits after tapped tokens, as decoding gets them."""
    proposer, weights = DraftHeadProposer(config), _on_device(weights)
    context, slots = _context(config, weights, taps)
    return np.asarray(proposer.propose(weights, context, target, anchor, slots))


def _hidden_states(config: DraftHeadConfig, weights: Weights) -> np.ndarray:
    """A head's final hidden states of random draft slots after a context of random taps."""
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
    """The head's stores of one sequence of tapped tokens, in one page."""
    tokens = taps.shape[1]
    empty = empty_stores(config.layers, 1, tokens, taps.dtype)
    slots = Slots.of(jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    count = jnp.full(1, tokens, jnp.int32)
    context = DraftHeadProposer(config).commit(weights, empty, taps, slots, count)
    return context, slots._replace(lengths=count)


def in_float32(config: ModelConfig, weights: Weights) -> Transformer:
    """A target that computes in float32, whatever its weights are: modules follow the embedding's type.

    float16 would overflow in some models, and bfloat16 would hide small differences and is slow on CPUs.
    Layers that are unread are read when they run.
    """
    ends = _on_device({name: own for name, own in weights.items() if name != "layers"})
    ends["embed_tokens"] = ends["embed_tokens"].astype(jnp.float32)
    module = abstract(config)
    layers = _Layers(module.layers, weights["layers"])
    graph, state = nnx.split(module)
    nnx.replace_by_pure_dict(state, ends)
    module = nnx.merge(graph, state)
    assert isinstance(module, Transformer)
    vars(module)["layers"] = layers
    return module


class _Layers:
    """A target's layers, each bound to its weights when it is asked for, and kept by whoever asks alone."""

    def __init__(self, layers: Sequence[nnx.Module], weights: Mapping[int, Weights]):
        self._layers, self._weights = layers, weights

    def __iter__(self) -> Iterator[nnx.Module]:
        return (self[index] for index in range(len(self._layers)))

    def __getitem__(self, index: int) -> nnx.Module:
        graph, state = nnx.split(self._layers[index])
        nnx.replace_by_pure_dict(state, _on_device(self._weights[index]))
        return nnx.merge(graph, state)


def forward(target: Transformer, tokens: Int[Array, "1 T"], taps: tuple[int, ...] = ()) -> ForwardOutput:
    """A target over one sequence, each layer when the one before it is done."""
    block = Block.chain(tokens)
    return target(tokens, block.depths, _LayerByLayer(attend_over(None, None, block)), taps=taps)


@dataclass(frozen=True)
class _LayerByLayer:
    """Has each layer of attention begin when the layers before it are done.

    Python runs ahead of the device, and would have all layers' weights converted to float32 at once.
    """

    over_block: Mix

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B N H E"],
        kv: KV,
        *,
        scale: float,
        window: int | None,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B N H E"]:
        """Attends once the queries are there."""
        q = jax.block_until_ready(q)
        return self.over_block(layer, q, kv, scale=scale, window=window, sinks=sinks)

    def history(self, layer: int) -> History:
        """Nothing to wait for: of four layers one is of attention."""
        return self.over_block.history(layer)


def fixed_tokens(config: ModelConfig) -> Int[Array, "1 T"]:
    """Random token ids, the same ones for every model of a vocabulary."""
    count = min(TOKENS, config.max_position_embeddings)
    return jnp.asarray(np.random.default_rng(0).integers(config.vocab_size, size=(1, count)), jnp.int32)
