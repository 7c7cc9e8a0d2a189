"""A round as three programs, so that the host can see the trees, and mask choices, before it is settled.

::

    propose ──► trees ──► host: the tokens that each node may be followed by ──┐
                  └─────► verify, meanwhile on the device ─────────────────────┴──► settle

Shapes: L live slots, N nodes, V vocabulary.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Int, UInt32

from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.loop import jit_rounds
from jetspec_jax.decode.round import Verified
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord, pick, put
from jetspec_jax.device.mesh import WHOLE
from jetspec_jax.tree import TokenTree
from pallas_kernels import shards

# What a device has made of its part stays there until the next program: stacked, [devices, ...].
_EACH = PartitionSpec(shards.ALL)


def propose(
    decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, *live: Int[ArrayLike, "L"]
) -> TokenTree:
    """The first part: see `Round.propose`. Keeps the state.

    Args:
        decoder: The decoder.
        weights: The parameters.
        state: The state.
        *live: The slots that may decode, as for `TreeDecoder.decode`; none is all.
    """
    return jit_rounds(_propose, decoder.bucket, donate_argnums=())(decoder, weights, state, *live)


def verify(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    tree: TokenTree,
    *live: Int[ArrayLike, "L"],
) -> Verified:
    """The second part: see `Round.verify`. Keeps the state; what it returns is for `settle` alone."""
    return jit_rounds(_verify, decoder.bucket, donate_argnums=())(decoder, weights, state, tree, *live)


def settle(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    tree: TokenTree,
    verified: Verified,
    allowed: UInt32[ArrayLike, "L N words"],
    *live: Int[ArrayLike, "L"],
) -> tuple[DecodeState, tuple[RoundRecord, Bool[Array, "L"]]]:
    """The last part: see `Round.settle`. ``state`` is donated.

    Returns:
        The state, the record of one round with a leading axis as of many, and who decodes in the next.
    """
    program = jit_rounds(_settle, decoder.bucket)
    return program(decoder, weights, state, tree, verified, allowed, *live)


def _picked(state: DecodeState, live: tuple[Array, ...]) -> DecodeState:
    return pick(state, live[0]) if live else state


def _propose(decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, *live: Array) -> TokenTree:
    def own(weights: DecodeWeights, state: DecodeState, *live: Array) -> TokenTree:
        return decoder.propose(weights, _picked(state, live)).tree

    return decoder.on_mesh(own, results=WHOLE)(weights, state, *live)


def _verify(
    decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, tree: TokenTree, *live: Array
) -> Any:
    def own(weights: DecodeWeights, state: DecodeState, tree: TokenTree, *live: Array) -> Any:
        verified = decoder.verify(weights, _picked(state, live), tree)
        return jax.tree.map(lambda part: part[None], verified)

    return decoder.on_mesh(own, results=_EACH)(weights, state, tree, *live)


def _settle(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    tree: TokenTree,
    verified: Any,
    allowed: Array,
    *live: Array,
) -> tuple[DecodeState, Any]:
    def own(
        weights: DecodeWeights,
        state: DecodeState,
        tree: TokenTree,
        verified: Any,
        allowed: Array,
        *live: Array,
    ) -> tuple[DecodeState, Any]:
        mine = jax.tree.map(lambda part: part[0], verified)
        after, record, _ = decoder.settle(weights, _picked(state, live), tree, mine, allowed)
        told = jax.tree.map(lambda one: one[None], record), decoder.decodes(after)
        return put(state, live[0], after) if live else after, told

    on_mesh = decoder.on_mesh(own, others=(WHOLE, _EACH, *[WHOLE] * (1 + len(live))))
    return on_mesh(weights, state, tree, verified, allowed, *live)
