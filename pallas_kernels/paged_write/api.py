"""The public operation: it checks its arguments and chooses an implementation.

Shapes: B sequences, N block rows, R rows to write, P pages.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from pallas_kernels.checks import Expected, refuse, wrong_arrays
from pallas_kernels.dispatch import Operation
from pallas_kernels.paged_write import pallas_triton, reference

OPERATION = Operation.of(
    "paged_write", reference.paged_write, pallas_triton.paged_write, pallas_triton.unsupported
)
implementations = OPERATION.implementations


def paged_write(
    pools: Sequence[Shaped[Array, "P page ..."]],
    blocks: Sequence[Shaped[Array, "B N ..."]],
    nodes: Int32[Array, "B R"],
    slots: Int32[Array, "B R"],
    *,
    implementation: str | None = None,
) -> tuple[Shaped[Array, "P page ..."], ...]:
    """Write rows of every block into the pool beside it, all of them at the same places.

    For every b and r, row `nodes[b, r]` of `blocks[i][b]` goes to slot `slots[b, r]` of `pools[i]`, where
    slot s is place `s % page` of page `s // page`. Nothing is written where the slot lies outside
    [0, P * page) or the node outside [0, N). No two rows of a call may have the same slot. Bits are copied
    unchanged, and all other slots keep their values.

    One block of four rows, the rows 0 and 2 of which go to pages 3 and 1 of size 2:

        nodes  0  2 -1          page 0  . .     page 2  . .
        slots  7  2  3     ->   page 1  2 .     page 3  . 0

    Args:
        pools: at least one; row shapes and dtypes may differ. They are written in place if a jitted caller
            donates them, or carries them through a loop.
        blocks: one per pool, with the pool's rows.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or
            there is no such implementation.
        NotImplementedError: the named implementation does not support the case.
    """
    if not pools or len(pools) != len(blocks):
        raise ValueError(
            f"paged_write: {len(pools)} pools and {len(blocks)} blocks; there must be one block per pool"
        )
    if pools[0].ndim < 2 or blocks[0].ndim < 2 or nodes.ndim != 2:
        raise ValueError(
            "paged_write: pools must be [P, page, ...], blocks [B, N, ...] and nodes [B, R],"
            f" got {pools[0].shape}, {blocks[0].shape}, {nodes.shape}"
        )
    pages, block = pools[0].shape[:2], blocks[0].shape[:2]
    expected: list[Expected] = [
        ("nodes", nodes, (block[0], nodes.shape[1]), jnp.int32),
        ("slots", slots, nodes.shape, jnp.int32),
    ]
    for i, pool in enumerate(pools):
        row = pool.shape[2:]
        expected.append((f"pools[{i}]", pool, (*pages, *row), pool.dtype))
        expected.append((f"blocks[{i}]", blocks[i], (*block, *row), pool.dtype))

    wrong = []
    if pages[0] * pages[1] >= 2**31:
        wrong.append(f"{pages[0]} pages of {pages[1]} are more slots than an int32 can name")
    wrong += wrong_arrays(*expected, empty=False)
    refuse("paged_write", wrong)
    write = OPERATION.choose(implementation, pools, blocks, nodes, slots)
    return write(pools, blocks, nodes, slots)
