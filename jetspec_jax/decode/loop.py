"""The loop around the round: all rounds of a dispatch are one program, which never returns to the host."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int

from jetspec_jax.decode.state import DecodeState, RoundRecord


def repeat_rounds(
    step: Callable[[DecodeState], tuple[DecodeState, RoundRecord]],
    decodes: Callable[[DecodeState], Bool[Array, "B"]],
    state: DecodeState,
    rounds: Int[ArrayLike, ""],
    *,
    most: int,
) -> tuple[DecodeState, RoundRecord]:
    """Runs rounds until they are enough or nobody decodes.

    Args:
        step: One round.
        decodes: Which slots take part in one.
        state: Where the first begins.
        rounds: How many, at most ``most``.
        most: Static bound on the rounds.

    Returns:
        The state, and the records ``[most, B, ...]``; rounds that did not run have trees of 0 nodes and no
        tokens.
    """
    step = jax.jit(step, inline=True)  # traced once, for its shapes and for the loop
    shapes = jax.eval_shape(step, state)[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), shapes)

    def goes_on(carry: tuple[Array, DecodeState, RoundRecord]) -> Array:
        done, state, _ = carry
        return (done < jnp.minimum(rounds, most)) & jnp.any(decodes(state))

    def turn(carry: tuple[Array, DecodeState, RoundRecord]) -> tuple[Array, DecodeState, RoundRecord]:
        done, state, records = carry
        state, record = step(state)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=done, axis=0)
        return done + 1, state, jax.tree.map(put, records, record)

    _, state, records = jax.lax.while_loop(goes_on, turn, (jnp.int32(0), state, nothing))
    ran = records.tree_sizes[:, :, None] > 0
    return state, records._replace(tokens=jnp.where(ran, records.tokens, -1))


# XLA's own Triton products compete with cuBLAS's, timed with weights that still lie in the cache, where those
# of a model never do. For one row XLA's picks are faster; for a tree they are slower, so trees do without.
TREE_OPTIONS = {"xla_gpu_enable_triton_gemm": False}


@functools.cache
def jit_rounds(
    function: Callable[..., Any],
    bucket: int,
    static_argnums: int | tuple[int, ...] = 0,
    donate_argnums: int | tuple[int, ...] = 2,
) -> Any:
    """`jax.jit` of a function that runs rounds of a bucket, with what XLA is told for these.

    Equal arguments give the same jitted function, so nothing is compiled twice.
    """
    return jax.jit(
        function,
        static_argnums=static_argnums,
        donate_argnums=donate_argnums,
        compiler_options={} if bucket == 1 else TREE_OPTIONS,
    )
