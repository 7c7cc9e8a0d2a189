"""A round as three programs, so that the host can see the trees, and mask choices, before it is settled.

::

    propose ──► trees ──► host: the tokens that each node may be followed by ──┐
                  └─────► verify, meanwhile on the device ─────────────────────┴──► settle

Shapes: B slots, N nodes, V vocabulary.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, UInt32

from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.loop import jit_rounds
from jetspec_jax.decode.round import Verified
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord
from jetspec_jax.device.mesh import WHOLE
from jetspec_jax.tree import TokenTree
from pallas_kernels import shards

# What a device has made of its part stays there until the next program: stacked, [devices, ...].
_EACH = PartitionSpec(shards.ALL)


def propose(decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState) -> TokenTree:
    """The first part: see `Round.propose`. Keeps the state."""
    return jit_rounds(_propose, decoder.bucket, donate_argnums=())(decoder, weights, state)


def verify(decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, tree: TokenTree) -> Verified:
    """The second part: see `Round.verify`. Keeps the state; what it returns is for `settle` alone."""
    return jit_rounds(_verify, decoder.bucket, donate_argnums=())(decoder, weights, state, tree)


def settle(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    tree: TokenTree,
    verified: Verified,
    allowed: UInt32[ArrayLike, "B N words"],
) -> tuple[DecodeState, RoundRecord]:
    """The last part: see `Round.settle`. ``state`` is donated.

    Returns:
        The state, and the record of one round, with a leading axis as those of many have.
    """
    return jit_rounds(_settle, decoder.bucket)(decoder, weights, state, tree, verified, allowed)


def _propose(decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState) -> TokenTree:
    def own(weights: DecodeWeights, state: DecodeState) -> TokenTree:
        return decoder.propose(weights, state).tree

    return decoder.on_mesh(own, results=WHOLE)(weights, state)


def _verify(decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, tree: TokenTree) -> Any:
    def own(weights: DecodeWeights, state: DecodeState, tree: TokenTree) -> Any:
        return jax.tree.map(lambda part: part[None], decoder.verify(weights, state, tree))

    return decoder.on_mesh(own, results=_EACH)(weights, state, tree)


def _settle(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    tree: TokenTree,
    verified: Any,
    allowed: UInt32[Array, "B N words"],
) -> tuple[DecodeState, RoundRecord]:
    def own(
        weights: DecodeWeights, state: DecodeState, tree: TokenTree, verified: Any, allowed: Array
    ) -> tuple[DecodeState, RoundRecord]:
        mine = jax.tree.map(lambda part: part[0], verified)
        after, record, _ = decoder.settle(weights, state, tree, mine, allowed)
        return after, jax.tree.map(lambda one: one[None], record)

    on_mesh = decoder.on_mesh(own, others=(WHOLE, _EACH, WHOLE))
    return on_mesh(weights, state, tree, verified, allowed)
