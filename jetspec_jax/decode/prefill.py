"""Prefill: a prompt enters a slot chunk by chunk, as a chain whose whole path is accepted.

One program serves all buckets, widths and algorithms. Shapes: B slots, C tokens of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.stores import after_forward, chain_path, commit
from jetspec_jax.config import ModelConfig
from jetspec_jax.decode.on_mesh import on_mesh
from jetspec_jax.decode.proposer import Proposer, taps_of
from jetspec_jax.decode.state import DecodeState, DecodeWeights
from jetspec_jax.models import bind
from jetspec_jax.sampling.choice import choose_tokens
from jetspec_jax.sampling.token_sets import contains


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=5)
def prefill(
    config: ModelConfig,
    proposer: Proposer | None,
    implementation: str | None,
    mesh: Mesh | None,
    weights: DecodeWeights,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, "C"],
    count: Int[Array, ""],
    is_last: Bool[Array, ""],
) -> tuple[DecodeState, Int[Array, ""]]:
    """Commits one chunk of a prompt to a slot while the others keep their state. ``state`` is donated.

    Every token of the chunk enters the target's stores and is shown to the proposer. After the last chunk the
    target's choice becomes the slot's anchor and the slot decodes, unless that token already ends it.

    Args:
        config: The target's geometry.
        proposer: The proposer; None without one.
        implementation: Of tree attention.
        mesh: The devices that share the models; None is one.
        weights: The parameters.
        state: The state.
        slot: Which slot.
        tokens: The chunk; from ``count`` on it is padding.
        count: Tokens of the chunk, at least 1.
        is_last: Whether the prompt ends here.

    Returns:
        The state, and the first generated token (meaningful after the last chunk).
    """
    chunk = functools.partial(_prefill, config, proposer, implementation)
    return on_mesh(mesh, config, proposer, chunk)(weights, state, slot, tokens, count, is_last)


def _prefill(
    config: ModelConfig,
    proposer: Proposer | None,
    implementation: str | None,
    weights: DecodeWeights,
    state: DecodeState,
    slot: Int[Array, ""],
    tokens: Int[Array, "C"],
    count: Int[Array, ""],
    is_last: Bool[Array, ""],
) -> tuple[DecodeState, Int[Array, ""]]:
    target = bind(config, weights.target)
    own = jax.tree.map(lambda x: x[slot][None], state.slots)
    settings = jax.tree.map(lambda x: x[slot][None], state.settings)
    count = count[None]
    block = Block.chain(tokens[None], num_nodes=count)
    attend = attend_over(state.stores, own, block, implementation=implementation)
    output = target(block.tokens, block.positions(own.lengths), attend, taps=taps_of(proposer))
    last_row = jnp.take_along_axis(output.hidden, count[:, None, None] - 1, axis=1)
    choice = choose_tokens(
        target.logits(last_row),
        jnp.zeros((1, 1), jnp.int32),
        own.lengths + count,
        settings.sampling,
        max_depth=0,
        vocab_size=config.vocab_size,
    )
    written = after_forward(count, choice)
    shown = state.proposer
    if proposer is not None:
        shown = proposer.commit(weights.proposer, shown, output.taps, own, written)
    finished = contains(settings.stop_bits, choice)[0, 0] | (settings.remaining[0] <= 1)
    anchor = choice[0, 0]
    state = DecodeState(
        stores=commit(state.stores, own, output.stash, chain_path(*block.tokens.shape), written),
        proposer=shown,
        slots=state.slots._replace(lengths=state.slots.lengths.at[slot].add(count[0])),
        anchors=state.anchors.at[slot].set(anchor),
        active=state.active.at[slot].set(is_last & ~finished),
        settings=state.settings._replace(
            remaining=state.settings.remaining.at[slot].add(-is_last.astype(jnp.int32))
        ),
    )
    return state, anchor
