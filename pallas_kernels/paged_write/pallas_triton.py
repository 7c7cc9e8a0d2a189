"""Paged write on Pallas's Triton backend: all pools in one launch, written in place.

Launches cost more time here than bytes: a round of speculation writes at most 16 rows of 2 KB to each
of 72 pools (Qwen3-8B), 2.4 MB in all. A program copies one row of a few pools:

    program (r, b, c)  =  row nodes[b, r] of blocks 8c ... 8c + 7  ->  slot slots[b, r] of their pools

A kernel cannot index its pointers, so the pools are unrolled, and a program branches to its pools.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Int32, Shaped

# Pools per launch. A kernel has 4 KB of parameters, which are 512 pointers: three per pool (its block, its
# input and its output, which are the same memory), the two indices, and those of Triton.
_POOLS_PER_CALL = 128
# Pools per program, which loads all rows before it stores the first: enough to hide the memory's latency, few
# enough for the registers and for many programs.
_POOLS_PER_PROGRAM = 8
_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)


def unsupported(pools: Sequence[Array], *_: object) -> str | None:
    """Why the kernel cannot run such a call on any GPU; None if it can."""
    for i, pool in enumerate(pools):
        if pool.dtype not in _DTYPES:
            return f"pools[{i}] holds {pool.dtype}, not one of float32, bfloat16, float16"
        if pool.size >= 2**31:
            return f"pools[{i}] has {pool.size} elements, more than 32 bits can address"
    return None


def paged_write(
    pools: Sequence[Shaped[Array, "P page ..."]],
    blocks: Sequence[Shaped[Array, "B N ..."]],
    nodes: Int32[Array, "B R"],
    slots: Int32[Array, "B R"],
    *,
    interpret: bool = False,
) -> tuple[Shaped[Array, "P page ..."], ...]:
    """See `api.paged_write`. `interpret` runs without a GPU."""
    written = []
    for start in range(0, len(pools), _POOLS_PER_CALL):
        part = slice(start, start + _POOLS_PER_CALL)
        written += _launch(pools[part], blocks[part], nodes, slots, interpret=interpret)
    return tuple(written)


def _launch(
    pools: Sequence[Array], blocks: Sequence[Array], nodes: Array, slots: Array, *, interpret: bool
) -> list[Array]:
    """One launch."""
    num_slots = pools[0].shape[0] * pools[0].shape[1]
    flat_pools = [pool.reshape(num_slots, -1) for pool in pools]
    flat_blocks = [block.reshape(*block.shape[:2], -1) for block in blocks]
    batch, rows = nodes.shape
    count = len(pools)
    launch: Any = pl.pallas_call(
        functools.partial(_paged_write, count),
        out_shape=[jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in flat_pools],
        grid=(rows, batch, pl.cdiv(count, _POOLS_PER_PROGRAM)),
        input_output_aliases={2 + count + i: i for i in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="paged_write",
    )
    written = launch(nodes, slots, *flat_blocks, *flat_pools)
    return [new.reshape(pool.shape) for new, pool in zip(written, pools, strict=True)]


def _paged_write(count: int, nodes_ref: Any, slots_ref: Any, *refs: Any) -> None:
    """One program: one row of its pools."""
    blocks, pools = refs[:count], refs[2 * count :]  # without the pools as inputs, which are not read
    b, r = pl.program_id(1), pl.program_id(0)
    node, slot = plgpu.load(nodes_ref.at[b, r]), plgpu.load(slots_ref.at[b, r])
    wanted = (node >= 0) & (node < blocks[0].shape[1]) & (slot >= 0) & (slot < pools[0].shape[0])
    for start in range(0, count, _POOLS_PER_PROGRAM):
        part = slice(start, start + _POOLS_PER_PROGRAM)
        ours = pl.program_id(2) == start // _POOLS_PER_PROGRAM
        pl.when(wanted & ours)(functools.partial(_copy, blocks[part], pools[part], b, node, slot))


def _copy(blocks: Sequence[Any], pools: Sequence[Any], b: Array, node: Array, slot: Array) -> None:
    """Row `node` of each block to place `slot` of its pool; every load is issued before the first store."""
    rows = []
    for block in blocks:
        lane, mask = _lanes(block.shape[-1])
        rows.append(plgpu.load(block.at[b, node, lane], mask=mask))
    for pool, row in zip(pools, rows, strict=True):
        lane, mask = _lanes(pool.shape[-1])
        plgpu.store(pool.at[slot, lane], row, mask=mask)


def _lanes(size: int) -> tuple[Array, Array | None]:
    """Indices of a row's elements, padded to a power of two, and a mask if there is padding."""
    lane = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
    return lane, None if lane.shape[0] == size else lane < size
