"""The phases of a round, each repeated on the device by a program of its own."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jetspec_jax import DecodeState, DecodeWeights, TreeDecoder
from jetspec_jax.decode.loop import jit_rounds
from jetspec_jax.decode.state import Stores, join, split

#: The results of the phases before, by name.
Made = Mapping[str, Any]


# In the order of a round. Without the proposal's candidates: the compiler may drop those that no tree uses.
PHASES: dict[str, Callable[[TreeDecoder, DecodeWeights, DecodeState, Made], Any]] = {
    "propose": lambda decoder, weights, state, made: decoder.propose(weights, state).tree,
    "verify": lambda decoder, weights, state, made: decoder.verify(weights, state, made["propose"]),
    "settle": lambda decoder, weights, state, made: decoder.settle(
        weights, state, made["propose"], made["verify"]
    )[:2],
}


def repeat(decoder: TreeDecoder) -> Any:
    """The jitted `_repeat`, compiled like the decoder's rounds."""
    return jit_rounds(_repeat, decoder.bucket, decoder.mesh, static_argnums=(0, 1), donate_argnums=3)


def _repeat(
    decoder: TreeDecoder,
    phase: str,
    weights: DecodeWeights,
    stores: Stores,
    inputs: tuple[DecodeState, Made],
    turns: Int[Array, ""],
) -> tuple[Stores, Any]:
    """Runs one phase ``turns`` times on the device. ``stores`` is donated.

    Args:
        phase: One of `PHASES`.
        weights: The parameters.
        stores: The state's stores; settling writes the same rows in every turn.
        inputs: The state without stores, and the results of the phases before.
        turns: The number of turns.

    Returns:
        The stores, and the phase's result (`settle`: the state without stores, and the record).
    """

    if decoder.proposer is not None:
        weights = weights._replace(proposer=decoder.proposer.prepare(weights.proposer))

    def run(stores: Stores, inputs: tuple[DecodeState, Made]) -> tuple[Stores, Any]:
        state, made = inputs
        result = PHASES[phase](decoder, weights, join(stores, state), made)
        if phase == "settle":
            state, record = result
            stores, state = split(state)
            result = state, record
        return stores, result

    def turn(_: Array, carried: tuple[Stores, Any, Any]) -> tuple[Stores, Any, Any]:
        stores, inputs, last = carried
        # To the compiler, inputs behind the barrier depend on the turn before, so it cannot move work out of
        # the loop. The weights do not pass the barrier, as in a round.
        inputs, _ = jax.lax.optimization_barrier((inputs, last))
        stores, result = run(stores, inputs)
        return stores, inputs, result

    shapes = jax.eval_shape(run, stores, inputs)[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    stores, _, result = jax.lax.fori_loop(0, turns, turn, (stores, inputs, nothing))
    return stores, result
