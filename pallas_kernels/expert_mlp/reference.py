"""Experts in plain JAX: the specification, the test oracle and the fallback.

Rows are sorted by expert and cut into blocks, none of which has rows of two experts; a block's products are
dense. So the work grows with the rows, not with rows times experts, and no expert that nobody asked for
counts, which `jax.lax.ragged_dot` does not give: XLA multiplies every row with every expert and keeps what
counts, on GPUs too, and 0 * NaN is NaN. Blocks one after the other leave most of a GPU idle, so that
`ragged_dot` may still be faster there. For speed there are the kernels.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels.activation import Activation
from pallas_kernels.matmul import matmul
from pallas_kernels.weights import Narrow

_LARGEST_BLOCK = 128


def expert_mlp(
    x: Float[Array, "T M"],
    gate_up: Float[Array, "E M 2 I"] | Narrow,
    down: Float[Array, "E I M"] | Narrow,
    experts: Int32[Array, "T K"],
    weights: Float32[Array, "T K"],
    gate_up_bias: Float[Array, "E 2 I"] | None,
    down_bias: Float[Array, "E M"] | None,
    *,
    activation: Activation,
) -> Float[Array, "T M"]:
    """See `api.expert_mlp`, which explains the shapes and checks them."""
    (num_experts, _, size), (_, top_k) = down.shape, experts.shape
    rows = experts.size
    expert = experts.reshape(rows)
    expert = jnp.where((expert >= 0) & (expert < num_experts), expert, num_experts)
    order = jnp.argsort(expert)  # the rows of expert 0, of expert 1, ..., of none
    counts = jnp.bincount(expert, length=num_experts)
    starts = jnp.cumsum(counts) - counts
    # Two experts with 5 and 2 rows in blocks of 4: the blocks 0 and 1 are the first's, block 2 the second's.
    block_rows = min(_LARGEST_BLOCK, 1 << (rows // num_experts).bit_length())
    blocks = -(-counts // block_rows)
    ends = jnp.cumsum(blocks)
    # Never a kernel: this is the oracle of the experts' kernel, and what "xla" means.
    product = functools.partial(matmul, wide=True, implementation="xla")

    def compute(block: Int[Array, ""]) -> tuple[Int[Array, "rows"], Float32[Array, "rows M"]]:
        e = jnp.minimum(jnp.sum(ends <= block), num_experts - 1)
        place = (block - ends[e] + blocks[e]) * block_rows + jnp.arange(block_rows)
        row = order[jnp.where(place < counts[e], starts[e] + place, 0)]
        gates = product("rm,mgi->rgi", x[row // top_k], gate_up[e])
        if gate_up_bias is not None:
            gates += gate_up_bias[e][None].astype(jnp.float32)
        hidden = activation(gates[:, 0], gates[:, 1]).astype(x.dtype)
        out = product("ri,im->rm", hidden, down[e])
        if down_bias is not None:
            out += down_bias[e][None].astype(jnp.float32)
        return jnp.where(place < counts[e], row, rows), out

    # Enough for all rows: every expert with rows has at most one block that is not full.
    most = min(rows, num_experts + rows // block_rows)
    row, out = jax.lax.map(compute, jnp.arange(most))
    sums = jnp.zeros((rows, size), jnp.float32)
    sums = sums.at[row.reshape(-1)].set(out.reshape(-1, size), mode="drop").reshape(*experts.shape, size)
    known = (experts >= 0) & (experts < num_experts)
    return jnp.sum(jnp.where(known[:, :, None], weights[:, :, None] * sums, 0), axis=1).astype(x.dtype)
