"""Prefill: prompts enter their slots chunk by chunk, as chains whose whole paths are accepted.

All of a prompt but its last token is committed: that one is the anchor of the request's first round, so that
every choice is a round's. One program serves all buckets, widths and algorithms.

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
    """Commits a chunk of each of some prompts in one forward; other slots keep their state.

    ``state`` is donated. Every token of a chunk enters the target's stores and is shown to the proposer.

    Args:
        models: The models.
        weights: The parameters.
        state: The state.
        slots: Whose prompts, each slot once.
        tokens: Their chunks; from its count on each is padding.
        counts: Tokens of each chunk; 0 is none, and leaves its slot as it is.
        ready: Which slots decode from now on, as only the anchor is left of their prompts.
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
    target, own, proposer = bind(models.target, weights.target), pick(state, slots), models.proposer
    block = Block.chain(tokens, num_nodes=counts)
    attend = attend_over(own.stores, own.slots, block, implementation=models.implementation)
    output = target(block.tokens, block.positions(own.slots.lengths), attend, taps=taps_of(proposer))
    # No logits: a place in a row is a number that is never negative, as a choice would be.
    written = after_forward(counts, jnp.argmax(output.hidden[:, -1:], axis=-1))
    shown = own.proposer
    if proposer is not None:
        shown = proposer.commit(weights.proposer, shown, output.taps, own.slots, written)
    picked = dataclasses.replace(
        own,
        stores=commit(own.stores, own.slots, output.stash, chain_path(*block.tokens.shape), written),
        proposer=shown,
        slots=own.slots._replace(lengths=own.slots.lengths + counts),
        active=own.active | ready,
    )
    return put(state, slots, picked), None
