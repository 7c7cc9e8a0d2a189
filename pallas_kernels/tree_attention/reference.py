"""Tree attention in plain JAX: the specification, the test oracle and the fallback.

Shapes: B sequences, N block rows, H query heads, G key/value heads, R = H // G, E head size,
P pages, T pages per sequence, S = T * page prefix slots, K keys (S or N) of one part.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int32, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class PagedPrefix:
    """The committed tokens of every sequence, in pages of one shared pool.

    The token at position s < lengths[b] lies in page `block_tables[b, s // page]`, slot `s % page`.
    A table entry outside [0, P) means "no page" and stands only where no token below the length
    does. Slots at or past the length may hold anything, NaN included.
    """

    k_pages: Float[Array, "P page G E"]
    v_pages: Float[Array, "P page G E"]
    block_tables: Int32[Array, "B T"]
    lengths: Int32[Array, "B"]


def unpack_mask(mask: UInt32[Array, "B N words"]) -> Bool[Array, "B N N"]:
    """Bit j % 32 of word j // 32 of row i says whether row i sees row j; bits past N are ignored.

    The tree 0 -> 1 -> 2, 0 -> 3 in one word per row, and unpacked (row i down, row j across):

        0b0001        1 . . .
        0b0011   ->   1 1 . .
        0b0111        1 1 1 .
        0b1001        1 . . 1
    """
    batch, rows, words = mask.shape
    bits = jnp.arange(32, dtype=jnp.uint32)[None, None, None, :]
    seen = (mask[:, :, :, None] >> bits) & jnp.uint32(1)
    return seen.reshape(batch, rows, words * 32)[:, :, :rows].astype(bool)


def visible_in_block(
    mask: UInt32[Array, "B N words"], depths: Int[Array, "B N"], window: int | None
) -> Bool[Array, "B N N"]:
    """Which row sees which row of the block: by the mask, less what the window hides."""
    visible = unpack_mask(mask)
    if window is not None:
        visible &= depths[:, None, :] > depths[:, :, None] - window
    return visible


def _gather(pages: Float[Array, "P page G E"], tables: Int32[Array, "B T"]) -> Array:
    """The pages of every sequence in logical order, [B, S, G, E]; "no page" reads some page."""
    batch, table = tables.shape
    _, page, heads, size = pages.shape
    rows = jnp.take(pages, tables, axis=0, mode="clip")
    return rows.reshape(batch, table * page, heads, size)


def _contract(equation: str, left: Array, right: Array) -> Array:
    """A product in the input dtype, accumulated in float32; full precision for float32 inputs."""
    exact = jax.lax.Precision.HIGHEST if right.dtype == jnp.float32 else None
    return jnp.einsum(equation, left, right, precision=exact, preferred_element_type=jnp.float32)


def tree_attention(
    q: Float[Array, "B N H E"],
    k: Float[Array, "B N G E"],
    v: Float[Array, "B N G E"],
    mask: UInt32[Array, "B N words"],
    prefix: PagedPrefix | None,
    *,
    scale: float,
    window: int | None,
    depths: Int[Array, "B N"],
    sinks: Float[Array, "H"] | None,
) -> Float[Array, "B N H E"]:
    """See `api.tree_attention`, which checks the shapes and fills in `depths`."""
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    q = q.reshape(batch, rows, kv_heads, heads // kv_heads, size)

    # Positions count from the prefix's length: row i stands at depths[i], slot s at s - length.
    at = depths[:, :, None]
    parts = [(k, v, visible_in_block(mask, depths, window))]
    if prefix is not None:
        keys = _gather(prefix.k_pages, prefix.block_tables)
        values = _gather(prefix.v_pages, prefix.block_tables)
        slots = jnp.arange(keys.shape[1], dtype=jnp.int32)[None, None, :]
        slots -= prefix.lengths[:, None, None]
        visible = slots < 0
        if window is not None:
            visible &= slots > at - window
        parts.append((keys, values, visible))

    if sinks is None:
        sinks = jnp.full((heads,), -jnp.inf, jnp.float32)
    sinks = sinks.astype(jnp.float32).reshape(1, kv_heads, heads // kv_heads, 1, 1)

    # One softmax over both parts. A row that sees nothing has scores of -inf only, and the finite
    # floor under its maximum makes its weights exact zeros.
    top = jnp.maximum(sinks, jnp.finfo(jnp.float32).min)
    scores = []
    for keys, _, visible in parts:
        products = _contract("bngre,bkge->bgrnk", q, keys) * scale
        scores.append(jnp.where(visible[:, None, None, :, :], products, -jnp.inf))
        top = jnp.maximum(top, scores[-1].max(axis=-1, keepdims=True, initial=-jnp.inf))

    total = jnp.exp(sinks - top)
    out = jnp.zeros((batch, kv_heads, heads // kv_heads, rows, size), jnp.float32)
    for (_, values, visible), part in zip(parts, scores, strict=True):
        weights = jnp.exp(part - top)
        total += weights.sum(axis=-1, keepdims=True)
        # Zero times NaN is NaN: a value that nobody sees must go before the product.
        values = jnp.where(visible.any(axis=1)[:, :, None, None], values, 0)
        out += _contract("bgrnk,bkge->bgrne", weights.astype(values.dtype), values)
    out /= jnp.where(total == 0, 1, total)
    return jnp.moveaxis(out, 3, 1).reshape(batch, rows, heads, size).astype(v.dtype)
