"""The public operation: it checks its arguments, fills in defaults and chooses an implementation.

Shapes: B sequences, N block rows, H query heads, G key/value heads, E head size, words of 32 rows,
P pages, T pages per sequence.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.checks import FLOATS, refuse, wrong_arrays
from pallas_kernels.dispatch import Operation
from pallas_kernels.tree_attention import pallas_triton, reference
from pallas_kernels.tree_attention.reference import PagedPrefix

OPERATION = Operation.of(
    "tree_attention", reference.tree_attention, pallas_triton.tree_attention, pallas_triton.unsupported
)
implementations = OPERATION.implementations
check_implementation = OPERATION.check


def tree_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B N G E"],
    v: Float[Array, "B N G E"],
    mask: UInt32[Array, "B N words"],
    prefix: PagedPrefix | None = None,
    *,
    scale: float,
    window: int | None = None,
    depths: Int[Array, "B N"] | None = None,
    sinks: Float[Array, "H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B N H E"]:
    """Attend from a block of N rows to the committed prefix and, through `mask`, to the block.

    Row i stands at position `prefix.lengths + depths[i]`. It sees every prefix token and each block
    row j whose bit j % 32 of `mask[i, j // 32]` is set (also for itself), except those that
    `window` hides. Query head h reads key/value head h // (H // G). Softmax is in
    float32; products are in the dtype of the inputs with float32 accumulation. A row that sees
    nothing gives zeros, and a key or value that no row sees may be NaN.

    Args:
        mask: packed inner mask; words = ceil(N / 32), see `reference.unpack_mask`.
        prefix: the committed tokens; None when there are none.
        scale: factor on the scores, positive.
        window: W lets a query at position p see keys at positions > p - W only; None, all.
        depths: positions of the rows after the prefix; None, a chain 0, 1, ..., N - 1.
        sinks: one logit per query head that joins the softmax's denominator only.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or
            there is no such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    if q.ndim != 4 or k.ndim != 4:
        raise ValueError(
            f"tree_attention: q must be [B, N, H, E] and k [B, N, G, E], got {q.shape}, {k.shape}"
        )
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    block = (batch, rows, kv_heads, size)
    wrong = []
    if kv_heads < 1 or heads % kv_heads:
        wrong.append(f"{heads} query heads do not divide among {kv_heads} key/value heads")
    if not 0 < scale < math.inf:
        wrong.append(f"scale is {scale}; it must be positive")
    if window is not None and not 1 <= window < 2**31:
        wrong.append(f"window is {window}; it counts the query's own position, so at least 1")
    wrong += wrong_arrays(
        ("q", q, q.shape, FLOATS),
        ("k", k, block, q.dtype),
        ("v", v, block, q.dtype),
        ("mask", mask, (batch, rows, -(-rows // 32)), jnp.uint32),
        ("depths", depths, (batch, rows), jnp.signedinteger),
        ("sinks", sinks, (heads,), jnp.floating),
    )
    if prefix is not None:
        pool = (*prefix.k_pages.shape[:2], kv_heads, size)
        table = (batch, *prefix.block_tables.shape[-1:])
        wrong += wrong_arrays(
            ("prefix.k_pages", prefix.k_pages, pool, q.dtype),
            ("prefix.v_pages", prefix.v_pages, pool, q.dtype),
            ("prefix.block_tables", prefix.block_tables, table, jnp.int32),
            ("prefix.lengths", prefix.lengths, (batch,), jnp.int32),
        )
        if 0 in prefix.k_pages.shape[:2]:
            wrong.append(f"prefix.k_pages is {prefix.k_pages.shape}: no page or no slot to read")
    refuse("tree_attention", wrong)
    run = OPERATION.choose(implementation, q, k, v, mask, prefix)
    if depths is None:
        depths = jnp.broadcast_to(jnp.arange(rows, dtype=jnp.int32)[None, :], (batch, rows))
    return run(q, k, v, mask, prefix, scale=scale, window=window, depths=depths, sinks=sinks)
