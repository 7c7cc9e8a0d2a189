"""The loop around the round: all rounds of a dispatch are one program, which never returns to the host.

A `decoder` is a `jetspec_jax.decode.TreeDecoder`, which runs these programs.

Shapes: B slots.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int, Int32

from jetspec_jax.decode.state import DecodeState, DecodeWeights, RoundRecord
from jetspec_jax.decode.unseen import as_words, write_rows
from jetspec_jax.tree import tree_buckets


def _loop(
    decoder: Any, weights: DecodeWeights, state: DecodeState, rounds: Int[ArrayLike, ""]
) -> tuple[DecodeState, RoundRecord]:
    """Rounds one after another: see `TreeDecoder.decode`."""
    # What no round changes is made before the loop: XLA would make some of it in every round.
    if decoder.proposer is not None:
        weights = weights._replace(proposer=decoder.proposer.prepare(weights.proposer))

    def step(state: DecodeState) -> tuple[DecodeState, RoundRecord]:
        return decoder.round(weights, state)

    state, records = _repeat(decoder, step, state, rounds, _no_records(decoder, state))
    # Once for all rounds: in each it would be launches of its own.
    return state, records.with_reach(tree_buckets(decoder.bucket)) if decoder.observes else records


def _late_loop(
    decoder: Any, weights: DecodeWeights, state: DecodeState, rounds: Int[ArrayLike, ""]
) -> tuple[DecodeState, RoundRecord]:
    """Plain rounds, which the proposer has to see later: see `TreeDecoder.decode_unfed`."""

    unseen, starts = state.unseen, state.slots.lengths
    assert unseen is not None, "of a decoder with a proposer"

    def step(state: DecodeState) -> tuple[DecodeState, Int32[Array, "B fields"]]:
        tree = decoder.build(state, None)
        output = decoder.verify(weights, state, tree)
        accepted = decoder.accept(state, tree, output.logits)
        state, record = decoder.advance(state, tree, output, accepted)
        # Every array that a loop writes is a launch of every round.
        return state, jnp.concatenate([record.packed, as_words(output.taps[:, 0])], axis=-1)

    records = _no_records(decoder, state)
    fields = records.packed.shape[-1]
    nothing = jnp.pad(records.packed, [(0, 0), (0, 0), (0, unseen.shape[-1])])
    state, made = _repeat(decoder, step, state, rounds, nothing)
    slots = jnp.arange(len(unseen), dtype=jnp.int32)
    unseen = write_rows(unseen, slots, made[..., fields:].swapaxes(0, 1), starts)
    return replace(state, unseen=unseen), replace(records, packed=made[..., :fields])


def _repeat(
    decoder: Any,
    step: Callable[[DecodeState], tuple[DecodeState, Any]],
    state: DecodeState,
    rounds: Int[ArrayLike, ""],
    nothing: Any,
) -> tuple[DecodeState, Any]:
    """Runs rounds until they are enough or nobody decodes; what each makes is put into its row."""

    def goes_on(carry: tuple[Array, DecodeState, Any]) -> Array:
        done, state, _ = carry
        return (done < jnp.minimum(rounds, decoder.max_rounds)) & jnp.any(state.active)

    def turn(carry: tuple[Array, DecodeState, Any]) -> tuple[Array, DecodeState, Any]:
        done, state, made = carry
        state, one = step(state)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=done, axis=0)
        return done + 1, state, jax.tree.map(put, made, one)

    return jax.lax.while_loop(goes_on, turn, (jnp.int32(0), state, nothing))[1:]


def _no_records(decoder: Any, state: DecodeState) -> RoundRecord:
    """The records of all rounds of a loop, before any ran."""
    rounds = decoder.max_rounds, state.anchors.shape[0]
    path = jnp.full((*rounds, decoder.depth + 1), -1, jnp.int32)
    seen = (path, jnp.full((*rounds, decoder.bucket), -jnp.inf)) if decoder.observes else ()
    return RoundRecord.of(path, jnp.zeros(rounds, jnp.int32), *seen)


# Layers are unrolled, and all rounds of a dispatch are one `while`: XLA's look at its condition is 1 % of a
# Qwen3-8B round on an H200. Several rounds between two looks and no graphs at all were no faster. The whole
# loop as one CUDA graph takes 8 % off the plain rounds of the demo pair, nothing off those of Qwen3-8B, and
# puts 6 to 40 % on those of Qwen3-30B-A3B; a tree, which is built by loops of its own, takes thrice as long.
# One flag matters: whether XLA's own Triton products compete with cuBLAS's. XLA picks by timing them with
# weights that still lie in the cache, where those of a model never do. For one row its picks make a step 4 %
# faster; for a tree they split sums over launches of their own: a round is 5 % slower.
TREE_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
PLAIN_LOOP = jax.jit(_loop, static_argnums=0, donate_argnums=2)
LATE_LOOP = jax.jit(_late_loop, static_argnums=0, donate_argnums=2)
TREE_LOOP = jax.jit(_loop, static_argnums=0, donate_argnums=2, compiler_options=TREE_OPTIONS)
