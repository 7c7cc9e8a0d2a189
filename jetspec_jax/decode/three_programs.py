"""A round as three programs, so that the host can read the trees and mask choices before it is settled.

::

    propose ──► trees ──► host: the tokens that may follow each node ──────────┐
                  └─────► verify, meanwhile on the device ─────────────────────┴──► settle

Shapes: L live slots, N nodes, V vocabulary.
"""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Int, UInt32

from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.loop import jit_rounds
from jetspec_jax.decode.round import Verified
from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord, pick, put
from jetspec_jax.device.mesh import WHOLE
from jetspec_jax.tree import TokenTree
from pallas_kernels import shards

# Results of each device stay there until the next program, stacked as [devices, ...].
_EACH = PartitionSpec(shards.ALL)


def propose(
    decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, *live: Int[ArrayLike, "L"]
) -> TokenTree:
    """The first program: see `Round.propose`. The state is not donated."""
    program = jit_rounds(_propose, decoder.bucket, decoder.mesh, donate_argnums=())
    return program(decoder, weights, state, *live)


def verify(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    tree: TokenTree,
    *live: Int[ArrayLike, "L"],
) -> Verified:
    """The second program: see `Round.verify`. The state is not donated; the result is only for `settle`."""
    program = jit_rounds(_verify, decoder.bucket, decoder.mesh, donate_argnums=())
    return program(decoder, weights, state, tree, *live)


def settle(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    tree: TokenTree,
    verified: Verified,
    allowed: UInt32[ArrayLike, "L N words"],
    *live: Int[ArrayLike, "L"],
) -> tuple[DecodeState, tuple[RoundRecord, Bool[Array, "L"]]]:
    """The last program: see `Round.settle`. ``state`` is donated.

    Returns the state, the record with a leading axis of one round, and whether each slot decodes in the next.
    """
    program = jit_rounds(_settle, decoder.bucket, decoder.mesh)
    return program(decoder, weights, state, tree, verified, allowed, *live)


def compile_all(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    *live: Any,
    tracing: contextlib.AbstractContextManager[Any],
) -> None:
    """Compiles the three programs for arguments' shapes and placements, each under ``tracing``."""
    slots = (live[0] if live else state.active).shape[0]
    words = -(-decoder.target.vocab_size // 32)
    allowed = jax.ShapeDtypeStruct((slots, decoder.bucket, words), jnp.uint32)

    def results(function: Any, donated: int | tuple[int, ...], *arguments: Any) -> Any:
        with tracing:
            lowered = jit_rounds(function, decoder.bucket, decoder.mesh, donate_argnums=donated).lower(
                decoder, weights, state, *arguments, *live
            )
        placements = lowered.compile().output_shardings

        def result(leaf: Any, placement: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=None if decoder.mesh is None else placement
            )

        return jax.tree.map(result, lowered.out_info, placements)

    tree = results(_propose, ())
    results(_settle, 2, tree, results(_verify, (), tree), allowed)


def _picked(state: DecodeState, live: tuple[Array, ...]) -> DecodeState:
    return pick(state, live[0]) if live else state


def _propose(decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, *live: Array) -> TokenTree:
    def run(weights: DecodeWeights, state: DecodeState, *live: Array) -> TokenTree:
        return decoder.propose(weights, _picked(state, live)).tree

    return decoder.on_mesh(run, results=WHOLE)(weights, state, *live)


def _verify(
    decoder: TreeDecoder, weights: DecodeWeights, state: DecodeState, tree: TokenTree, *live: Array
) -> Any:
    def run(weights: DecodeWeights, state: DecodeState, tree: TokenTree, *live: Array) -> Any:
        verified = decoder.verify(weights, _picked(state, live), tree)
        return jax.tree.map(lambda part: part[None], verified)

    return decoder.on_mesh(run, results=_EACH)(weights, state, tree, *live)


def _settle(
    decoder: TreeDecoder,
    weights: DecodeWeights,
    state: DecodeState,
    tree: TokenTree,
    verified: Any,
    allowed: Array,
    *live: Array,
) -> tuple[DecodeState, Any]:
    def run(
        weights: DecodeWeights,
        state: DecodeState,
        tree: TokenTree,
        verified: Any,
        allowed: Array,
        *live: Array,
    ) -> tuple[DecodeState, Any]:
        local = jax.tree.map(lambda part: part[0], verified)
        after, record, _ = decoder.settle(weights, _picked(state, live), tree, local, allowed)
        results = jax.tree.map(lambda leaf: leaf[None], record), decoder.decodes(after)
        return put(state, live[0], after) if live else after, results

    on_mesh = decoder.on_mesh(run, others=(WHOLE, _EACH, *[WHOLE] * (1 + len(live))))
    return on_mesh(weights, state, tree, verified, allowed, *live)
