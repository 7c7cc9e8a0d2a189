"""Counts the experts that a round reads: those that the nodes of its tree choose."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax import DecodeState, DecodeWeights, TreeDecoder
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.models import bind
from jetspec_jax.models.feed_forward import RoutedExperts
from pallas_kernels.expert_choice import ExpertChoice


class _Counting(nnx.Module):
    """A layer's experts, which also report how many of them were chosen."""

    def __init__(self, experts: RoutedExperts, note: Callable[[Int[Array, ""]], None]):
        self.experts, self.note = experts, note

    @property
    def config(self):
        """The experts' config, which a router reads."""
        return self.experts.config

    @property
    def local_size(self) -> int:
        """The experts' size on this device; a block sums over devices."""
        return self.experts.local_size

    @property
    def whole_size(self) -> int:
        """The experts' size on all devices."""
        return self.experts.whole_size

    def __call__(self, rows: Float[Array, "T M"], choice: ExpertChoice) -> Float[Array, "T M"]:
        chosen = jnp.bincount(choice.experts.reshape(-1), length=self.config.count)
        self.note(jnp.sum(chosen > 0, dtype=jnp.int32))
        return self.experts(rows, choice)


@functools.partial(jax.jit, static_argnums=0)
def experts_touched(
    decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState
) -> dict[int, Int[Array, ""]]:
    """The number of different experts that the target's forward over a round's tree reads, by layer."""
    return decoder.on_mesh(functools.partial(_touched, decoder))(weights, state)[1]


def _touched(
    decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState
) -> tuple[DecodeState, dict[int, Int[Array, ""]]]:
    tree = decoder.propose(weights, state).tree
    target, block = bind(decoder.target, weights.target), Block.of_tree(tree, max_depth=decoder.depth)
    found: dict[int, Int[Array, ""]] = {}
    for index, layer in enumerate(target.layers):
        for _, module in list(nnx.iter_modules(layer)):
            for name, child in list(vars(module).items()):
                if isinstance(child, RoutedExperts):
                    setattr(module, name, _Counting(child, functools.partial(found.__setitem__, index)))
    attend = attend_over(state.stores, state.slots, block, implementation=decoder.implementation)
    target(block.tokens, block.positions(state.slots.lengths), attend)
    return state, found
