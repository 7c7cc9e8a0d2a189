"""The phases of a round, one at a time: each repeated on the device by a program of its own."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jetspec_jax import DecodeState, DecodeWeights, TreeDecoder
from jetspec_jax.decode.loop import jit_rounds
from jetspec_jax.decode.state import Stores, join, split

#: What the phases before have made, by their names.
Made = Mapping[str, Any]


# In the order of a round. A proposal's candidates are left out: what no tree looks at need not be made.
PHASES: dict[str, Callable[[TreeDecoder, DecodeWeights, DecodeState, Made], Any]] = {
    "propose": lambda decoder, weights, state, made: decoder.propose(weights, state).tree,
    "verify": lambda decoder, weights, state, made: decoder.verify(weights, state, made["propose"]),
    "settle": lambda decoder, weights, state, made: decoder.settle(
        weights, state, made["propose"], made["verify"]
    )[:2],
}


def repeat(decoder: TreeDecoder) -> Any:
    """The jitted `_repeat`, compiled as the decoder's rounds are."""
    return jit_rounds(_repeat, decoder.bucket, static_argnums=(0, 1), donate_argnums=3)


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
        decoder: The decoder whose phase it is.
        phase: One of `PHASES`.
        weights: The parameters.
        stores: Of the state; settling writes the same rows at every turn.
        inputs: The state without its stores, and what the phases before have made.
        turns: How often.

    Returns:
        The stores, and what the phase makes (`settle`: the state without its stores, and the record).
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
        # After the barrier the inputs come from the turn before, as far as the compiler knows, so that it
        # can move nothing out of the loop. The weights do not pass it, just as in a round.
        inputs, _ = jax.lax.optimization_barrier((inputs, last))
        stores, result = run(stores, inputs)
        return stores, inputs, result

    shapes = jax.eval_shape(run, stores, inputs)[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    stores, _, result = jax.lax.fori_loop(0, turns, turn, (stores, inputs, nothing))
    return stores, result
