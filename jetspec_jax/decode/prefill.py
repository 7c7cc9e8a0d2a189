"""Prefill: prompts are committed to their slots in chunks, as chains whose whole paths are accepted.

All tokens of a prompt except the last are committed. The last token is the anchor of the first round, so that
every token is chosen by a round. One program serves all buckets, widths and algorithms.

Shapes: B slots, P prompts, C tokens of a chunk.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.stores import after_forward, chain_path, commit
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.proposer import taps_of
from jetspec_jax.decode.state import DecodeState, DecodeWeights, pick, put
from jetspec_jax.models import bind


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(
    models: Models,
    weights: DecodeWeights,
    state: DecodeState,
    slots: Int[Array, "P"],
    tokens: Int[Array, "P C"],
    counts: Int[Array, "P"],
    ready: Bool[Array, "P"],
) -> DecodeState:
    """Commits a chunk of each of several prompts in one forward; other slots keep their state.

    ``state`` is donated. The tokens of a chunk are committed to the target's stores and to the proposer.

    Chunks are padded after their ``counts``; a count of 0 leaves the slot unchanged. ``ready`` slots start
    decoding, because their prompts are complete except for the anchor.
    """
    chunk = functools.partial(_prefill, models)
    state, _ = models.on_mesh(chunk)(weights, state, slots, tokens, counts, ready)
    return state


def _prefill(
    models: Models,
    weights: DecodeWeights,
    state: DecodeState,
    slots: Int[Array, "P"],
    tokens: Int[Array, "P C"],
    counts: Int[Array, "P"],
    ready: Bool[Array, "P"],
) -> tuple[DecodeState, None]:
    target, before, proposer = bind(models.target, weights.target), pick(state, slots), models.proposer
    block = Block.chain(tokens, num_nodes=counts)
    attend = attend_over(before.stores, before.slots, block, implementation=models.implementation)
    output = target(block.tokens, block.positions(before.slots.lengths), attend, taps=taps_of(proposer))
    # There are no logits; the index of a maximum is never negative, like a choice.
    written = after_forward(counts, jnp.argmax(output.hidden[:, -1:], axis=-1))
    proposer_state = before.proposer
    if proposer is not None:
        proposer_state = proposer.commit(weights.proposer, proposer_state, output.taps, before.slots, written)
    after = dataclasses.replace(
        before,
        stores=commit(before.stores, before.slots, output.stash, chain_path(*block.tokens.shape), written),
        proposer=proposer_state,
        slots=before.slots._replace(lengths=before.slots.lengths + counts),
        active=before.active | ready,
    )
    return put(state, slots, after), None
