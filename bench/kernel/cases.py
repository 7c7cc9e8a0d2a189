"""What the attention kernel is called with: random trees over pages, one call or a chain of layers.

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

# Copies of the layer in a round of the loop over layers: in a model there is no loop.
UNROLL = 4
# Pages that belong to nobody.
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


#: An implementation of the operation at some shape.
Attend = Callable[[AttentionCall], Array]


class TreeMasks(NamedTuple):
    """Who sees whom in the blocks of some sequences, on the host: seen [B, N, N], and depths [B, N]."""

    seen: np.ndarray
    depths: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        """Packed, [B, N, words]; the bits past N are set, and mean nothing."""
        batch, rows, _ = self.seen.shape
        bits = np.ones((batch, rows, -(-rows // 32) * 32), np.uint8)
        bits[:, :, :rows] = self.seen
        return np.packbits(bits, axis=-1, bitorder="little").view("<u4")


def attend_by(shape: AttentionShape, implementation: str) -> Attend:
    """The operation as `shape` uses it, by the named implementation."""
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
    """A block for each entry of `padding`, whose last so many rows see nothing and are seen by nobody.

    A block is a tree in which every node has some earlier node as its parent, each as likely as any other:
    256 nodes are about 15 deep. Above the largest bucket there are no trees, and a block is a prompt's chunk:
    each row follows the one before.
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
    """A call on sequences of these lengths, some rows of padding, and NaN in all that nobody may read."""
    batch, page = len(lengths), shape.page
    block = random_block(rng, rows, rng.integers(0, rows // 4 + 1, batch).tolist())

    def normal(*axes: int) -> np.ndarray:
        return rng.standard_normal((*axes, shape.head_size), np.float32).astype(dtype)

    k, v = normal(2, batch, rows, shape.kv_heads)
    unseen = ~block.seen.any(axis=1)
    k[unseen], v[unseen] = np.nan, np.nan

    owned = [-(-length // page) for length in lengths]
    num_pages = sum(owned) + SPARE
    pages = iter(rng.permutation(num_pages))
    pool = normal(2, num_pages, page, shape.kv_heads)
    # "No page" is any number that is no page's.
    tables = rng.choice([-1, -num_pages, num_pages, 2**31 - 1], (batch, max(1, *owned))).astype(np.int32)
    used = np.zeros((num_pages, page), bool)
    for table, length, count in zip(tables, lengths, owned, strict=True):
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
    """A call without padding on a prefix; only its block is made here, which all layers of a chain share."""
    batch, rows, _ = block.seen.shape

    def normal(heads: int) -> Array:
        values = rng.standard_normal((batch, rows, heads, shape.head_size), np.float32)
        return jnp.asarray(values.astype(dtype))

    q, k, v = normal(shape.heads), normal(shape.kv_heads), normal(shape.kv_heads)
    mask, depths = jnp.asarray(block.mask), jnp.asarray(block.depths)
    return AttentionCall(q, k, v, mask, prefix, depths, _sinks(rng, shape))


def random_pool(shape: AttentionShape, num_pages: int, dtype: np.dtype) -> tuple[Array, Array]:
    """Pages of keys and of values, [P, page, G, E], made on the device: they may be gigabytes."""
    axes = (num_pages, shape.page, shape.kv_heads, shape.head_size)

    @jax.jit
    def normal() -> tuple[Array, Array]:
        keys = jax.random.split(jax.random.key(0))
        return jax.random.normal(keys[0], axes, dtype), jax.random.normal(keys[1], axes, dtype)

    return normal()


def layer_tables(num_pages: int, layers: int, batch: int, pages: int, step: int) -> Int32[Array, "L B T"]:
    """Block tables of a chain's layers in one pool, scattered.

    Each sequence of each layer begins `step` pages after the one before, so their last `step` pages are
    different ones as long as the pool is large enough. Pages 0 to 5, three layers, T = 4, step = 2, before
    they are scattered:

        0 1 2 3
        2 3 4 5
        4 5 0 1
    """
    first = step * np.arange(layers * batch)[:, None]
    order = np.random.default_rng(0).permutation(num_pages).astype(np.int32)
    return jnp.asarray(order[(first + np.arange(pages)[None, :]) % num_pages].reshape(layers, batch, pages))


def chain(attend: Attend, call: AttentionCall, tables: Int32[Array, "L B T"]) -> Float[Array, "B N H E"]:
    """The layers one after the other: each asks with `call.q` plus what the one before it got.

    The sum makes them wait for each other without the queries fading away: attention averages.
    """

    # A function of its own, so that the kernel is traced and lowered once, not once for each copy.
    @jax.jit
    def layer(last: Array, table: Array) -> Array:
        prefix = replace(call.prefix, block_tables=table)
        return attend(call._replace(q=call.q + last, prefix=prefix))

    nothing = jnp.zeros_like(call.q)
    return jax.lax.scan(lambda last, table: (layer(last, table), None), nothing, tables, unroll=UNROLL)[0]


def _sinks(rng: np.random.Generator, shape: AttentionShape) -> Array | None:
    return jnp.asarray(rng.standard_normal(shape.heads, np.float32)) if shape.sinks else None
