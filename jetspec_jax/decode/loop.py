"""Several rounds as one program, which does not return to the host.

A loop may end early. But the host reads its condition, so its launch waits until all its rounds are over. The
launch of a single round waits for nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
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
    """Runs up to ``rounds`` rounds; ends early if no slot decodes. With ``most=1`` one round always runs.

    ``most`` is a static bound on the rounds. Returns the state, and the records ``[most, B, ...]``; rounds
    that did not run have trees of 0 nodes and no tokens.
    """
    if most == 1:
        state, record = step(state)
        return state, jax.tree.map(lambda leaf: leaf[None], record)
    step = jax.jit(step, inline=True)  # traced once, for its shapes and for the loop
    shapes = jax.eval_shape(step, state)[1]
    nothing = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), shapes)

    def continues(carry: tuple[Array, DecodeState, RoundRecord]) -> Array:
        done, state, _ = carry
        return (done < jnp.minimum(rounds, most)) & jnp.any(decodes(state))

    def turn(carry: tuple[Array, DecodeState, RoundRecord]) -> tuple[Array, DecodeState, RoundRecord]:
        done, state, records = carry
        state, record = step(state)
        put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=done, axis=0)
        return done + 1, state, jax.tree.map(put, records, record)

    _, state, records = jax.lax.while_loop(continues, turn, (jnp.int32(0), state, nothing))
    ran = records.tree_sizes[:, :, None] > 0
    return state, records._replace(tokens=jnp.where(ran, records.tokens, -1))


# XLA's autotuner compares its Triton products with cuBLAS on weights that are in the cache, unlike those of a
# model. Its choices are faster for one row, but slower for a tree, so Triton products are off for trees.
TREE_OPTIONS = {"xla_gpu_enable_triton_gemm": False}
# By default XLA keeps exchanges between devices out of CUDA graphs, so that the host launches what stands
# between two of them. The names are its default ones and the last. Measured with JAX 0.11.2, on GPUs of one
# process; JAX 0.12 has other defaults.
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,COLLECTIVES"
MESH_OPTIONS = {
    "xla_gpu_enable_command_buffer": _GRAPHS,
    "xla_gpu_disable_async_collectives": "ALLREDUCE,ALLGATHER",
}


@functools.cache
def jit_rounds(
    function: Callable[..., Any],
    bucket: int,
    mesh: Mesh | None,
    static_argnums: int | tuple[int, ...] = 0,
    donate_argnums: int | tuple[int, ...] = 2,
) -> Any:
    """`jax.jit` of a function that runs rounds of a bucket, with compiler options for bucket and mesh.

    Equal arguments return the same jitted function, so nothing is compiled twice.
    """
    options = {} if bucket == 1 else TREE_OPTIONS
    if mesh is not None and jax.process_count() == 1 and jax.__version_info__ < (0, 12):
        options = options | MESH_OPTIONS
    return jax.jit(
        function, static_argnums=static_argnums, donate_argnums=donate_argnums, compiler_options=options
    )
