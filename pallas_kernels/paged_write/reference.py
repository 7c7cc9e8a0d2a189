"""Paged write in plain JAX: the specification, the test oracle and the fallback."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped


def paged_write(
    pools: Sequence[Shaped[Array, "P page ..."]],
    blocks: Sequence[Shaped[Array, "B N ..."]],
    nodes: Int32[Array, "B R"],
    slots: Int32[Array, "B R"],
) -> tuple[Shaped[Array, "P page ..."], ...]:
    """See `api.paged_write`, which explains the shapes and checks them."""
    num_nodes = blocks[0].shape[1]
    num_pages, page_size = pools[0].shape[:2]
    num_slots = num_pages * page_size
    wanted = (nodes >= 0) & (nodes < num_nodes) & (slots >= 0) & (slots < num_slots)
    nodes = jnp.where(wanted, nodes, 0)
    slots = jnp.where(wanted, slots, num_slots)  # after the last: a negative index would count from there
    # Two indices, not one into a reshaped pool: around a reshape XLA does not always write in place.
    where = slots // page_size, slots % page_size

    def write(pool: Array, block: Array) -> Array:
        index = nodes.reshape(*nodes.shape, *(1 for _ in block.shape[2:]))
        return pool.at[where].set(jnp.take_along_axis(block, index, axis=1), mode="drop")

    return tuple(write(pool, block) for pool, block in zip(pools, blocks, strict=True))
