"""Inputs of the attention kernel: random trees over pages, for one call or a chain of layers.

Shapes: B sequences, N block rows, H query heads, G key/value heads, E head size, P pages, T pages per
sequence, L layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int32, UInt32

from jetspec_jax.tree import BUCKETS
from pallas_kernels.tree_attention import PagedPrefix, tree_attention
from pallas_kernels.tree_attention.shapes import AttentionShape

# Layers per turn of the loop over layers. A model has no loop.
UNROLL = 4
# Unused pages of the pool.
SPARE = 3


class AttentionCall(NamedTuple):
    """The arrays of a call of `tree_attention`."""

    q: Float[Array, "B N H E"]
    k: Float[Array, "B N G E"]
    v: Float[Array, "B N G E"]
    mask: UInt32[Array, "B N words"]
    prefix: PagedPrefix
    depths: Int[Array, "B N"]
    sinks: Float[Array, "H"] | None


#: The operation at one shape, by one implementation.
Attend = Callable[[AttentionCall], Array]


class TreeMasks(NamedTuple):
    """Masks on the host: row i of block b attends to row j if ``seen[b, i, j]``; and depths, [B, N]."""

    seen: np.ndarray
    depths: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """The packed mask, [B, N, words]; bits beyond N are set and must be ignored."""
        batch, rows, _ = self.seen.shape
        bits = np.ones((batch, rows, -(-rows // 32) * 32), np.uint8)
        bits[:, :, :rows] = self.seen
        return np.packbits(bits, axis=-1, bitorder="little").view("<u4")


def attend_by(shape: AttentionShape, implementation: str) -> Attend:
    """The operation at a shape, by the named implementation."""
    return lambda call: tree_attention(
        call.q,
        call.k,
        call.v,
        call.mask,
        call.prefix,
        scale=shape.head_size**-0.5,
        window=shape.window,
        depths=call.depths,
        sinks=call.sinks,
        implementation=implementation,
    )


def random_block(rng: np.random.Generator, rows: int, padding: Sequence[int]) -> TreeMasks:
    """A random block for each entry of ``padding``, the number of padding rows at its end.

    A block is a tree in which every earlier node is equally likely to be a node's parent: 256 nodes are about
    15 deep. Blocks above the largest bucket are prompt chunks: each row is the child of the row before.
    """
    seen = np.zeros((len(padding), rows, rows), bool)
    depths = np.zeros((len(padding), rows), np.int32)
    for b, unused in enumerate(padding):
        for i in range(rows - unused):
            if i:
                parent = i - 1 if rows > max(BUCKETS) else rng.integers(i)
                seen[b, i], depths[b, i] = seen[b, parent], depths[b, parent] + 1
            seen[b, i, i] = True
    return TreeMasks(seen, depths)


def ragged_call(
    rng: np.random.Generator, shape: AttentionShape, rows: int, lengths: Sequence[int], dtype: np.dtype
) -> AttentionCall:
    """A call on sequences of these lengths, with some padding rows, and NaN in all that must not be read."""
    batch, page = len(lengths), shape.page
    block = random_block(rng, rows, rng.integers(0, rows // 4 + 1, batch).tolist())

    def normal(*axes: int) -> np.ndarray:
        return rng.standard_normal((*axes, shape.head_size), np.float32).astype(dtype)

    k, v = normal(2, batch, rows, shape.kv_heads)
    unseen = ~block.seen.any(axis=1)
    k[unseen], v[unseen] = np.nan, np.nan

    used_pages = [-(-length // page) for length in lengths]
    num_pages = sum(used_pages) + SPARE
    pages = iter(rng.permutation(num_pages))
    pool = normal(2, num_pages, page, shape.kv_heads)
    # Unused entries of the block tables are numbers that are no page's.
    tables = rng.choice([-1, -num_pages, num_pages, 2**31 - 1], (batch, max(1, *used_pages))).astype(np.int32)
    used = np.zeros((num_pages, page), bool)
    for table, length, count in zip(tables, lengths, used_pages, strict=True):
        for i in range(count):
            table[i] = next(pages)
            used[table[i], : length - i * page] = True
    pool[:, ~used] = np.nan
    return AttentionCall(
        jnp.asarray(normal(batch, rows, shape.heads)),
        jnp.asarray(k),
        jnp.asarray(v),
        jnp.asarray(block.mask),
        PagedPrefix(*map(jnp.asarray, (*pool, tables, np.asarray(lengths, np.int32)))),
        jnp.asarray(block.depths),
        _sinks(rng, shape),
    )


def layer_call(
    rng: np.random.Generator, shape: AttentionShape, block: TreeMasks, prefix: PagedPrefix, dtype: np.dtype
) -> AttentionCall:
    """A call without padding on an existing prefix; all layers of a chain share its block."""
    batch, rows, _ = block.seen.shape

    def normal(heads: int) -> Array:
        values = rng.standard_normal((batch, rows, heads, shape.head_size), np.float32)
        return jnp.asarray(values.astype(dtype))

    q, k, v = normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads)
    mask, depths = jnp.asarray(block.mask), jnp.asarray(block.depths)
    return AttentionCall(q, k, v, mask, prefix, depths, _sinks(rng, shape))


def random_pool(shape: AttentionShape, num_pages: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Pages of keys and of values, [P, page, G, E], made on the device because they may be gigabytes."""
    axes = (num_pages, shape.page, shape.kv_heads, shape.head_size)

    @jax.jit
    def normal() -> tuple[Array, Array]:
        keys = jax.random.split(jax.random.key(0))
        return jax.random.normal(keys[0], axes, dtype), jax.random.normal(keys[1], axes, dtype)

    return normal()


def layer_tables(num_pages: int, layers: int, batch: int, pages: int, step: int) -> Int32[Array, "L B T"]:
    """Block tables of a chain's layers in one pool, shuffled.

    Each sequence of each layer begins ``step`` pages after the one before, so their last ``step`` pages
    differ if the pool is large enough. Example before shuffling: pages 0 to 5, three layers, T = 4, step = 2:

        0 1 2 3
        2 3 4 5
        4 5 0 1
    """
    first = step * np.arange(layers * batch)[:, None]
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    return jnp.asarray(order[(first + np.arange(pages)[None, :]) % num_pages].reshape(layers, batch, pages))


def chain(attend: Attend, call: AttentionCall, tables: Int32[Array, "L B T"]) -> Float[Array, "B N H E"]:
    """A chain of layers, in which each query is ``call.q`` plus the output of the layer before.

    The sum makes each layer depend on the one before. Without ``call.q`` queries would fade: attention
    averages.
    """

    # Jitted, so that the kernel is traced and lowered once, not once per unrolled copy.
    @jax.jit
    def layer(last: Array, table: Array) -> Array:
        prefix = replace(call.prefix, block_tables=table)
        return attend(call._replace(q=call.q + last, prefix=prefix))

    nothing = jnp.zeros_like(call.q)
    return jax.lax.scan(lambda last, table: (layer(last, table), None), nothing, tables, unroll=UNROLL)[0]


def _sinks(rng: np.random.Generator, shape: AttentionShape) -> Array | None:
    return jnp.asarray(rng.standard_normal(shape.heads, np.float32)) if shape.sinks else None
