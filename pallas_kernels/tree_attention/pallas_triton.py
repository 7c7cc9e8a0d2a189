"""Tree attention on Pallas's Triton backend: one pass over pages and block, split over the keys.

A program owns `block_rows` query rows of one sequence and one key/value head. Its rows are block rows times
the R query heads that share the head, so that keys and values are read once for all of them:

    row m of key/value head g  =  block row m // R, query head g * R + m % R

The keys of a row block are the prefix's pages, then the block itself, in steps of `block_keys`. `splits`
programs share them evenly; each keeps a running softmax (maximum, sum, weighted values), and a second kernel
merges the parts by log-sum-exp. The prefix's length is known on the device only, so a split's range is
computed there: a short prefix in a large table costs no steps.

Nothing here assumes a generation of GPUs; what differs between them is data (`config.py`).

Shapes: B sequences, N block rows, G key/value heads, R query heads of each, E head size, M = N * R rows,
Z splits, P pages, T pages per sequence.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.dispatch import device_kind
from pallas_kernels.tree_attention.config import Config, config_for
from pallas_kernels.tree_attention.reference import PagedPrefix, visible_in_block

# Exponentials are in base two, which is what the hardware computes.
_LOG2_E = math.log2(math.e)
# Below every score: a row that has seen nothing yet has weights of exactly zero, never of NaN.
_FLOOR = -1e30
_MAX_SPLITS = 64


def unsupported(
    q: Array, k: Array, v: Array, mask: Array, prefix: PagedPrefix | None, **_: object
) -> str | None:
    """Why the kernel cannot run such a call on any GPU; None if it can."""
    size = q.shape[-1]
    if size & (size - 1) or not 16 <= size <= 512:
        return f"head size {size} is not a power of two in 16..512"
    if prefix is not None and prefix.k_pages.shape[1] % 16:
        return f"pages of {prefix.k_pages.shape[1]} tokens are not a multiple of 16"
    return None


@functools.partial(jax.jit, static_argnames=("scale", "window", "config", "interpret"))
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
    config: Config | None = None,
    interpret: bool = False,
) -> Float[Array, "B N H E"]:
    """See `api.tree_attention`. `config` overrides the tuned one; `interpret` runs without a GPU."""
    batch, rows, heads, size = q.shape
    kv_heads = k.shape[2]
    ratio = heads // kv_heads
    if config is None:
        config = config_for(device_kind(), q.dtype.name, size, rows * ratio)
    block_keys = config.block_keys
    capacity = 0
    if prefix is not None:
        page = prefix.k_pages.shape[1]
        capacity = prefix.block_tables.shape[1] * page
        block_keys = math.gcd(block_keys, page)  # a step reads one page
    tiles = pl.cdiv(rows * ratio, config.block_rows)
    steps = pl.cdiv(capacity, block_keys) + pl.cdiv(rows, block_keys)
    splits = max(1, min(config.programs // (tiles * batch * kv_heads), steps, _MAX_SPLITS))
    call = _Call(
        rows=rows,
        kv_heads=kv_heads,
        ratio=ratio,
        block_rows=config.block_rows,
        block_keys=block_keys,
        splits=splits,
        has_prefix=prefix is not None,
        scale=scale * _LOG2_E,
        window=window,
        # Tensor cores would round float32 to TF32.
        precision=jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None,
    )

    grouped = (batch, rows, kv_heads, ratio)
    part = jax.ShapeDtypeStruct((splits, *grouped, size), jnp.float32)
    edge = jax.ShapeDtypeStruct((splits, *grouped), jnp.float32)
    launch: Callable[..., Any] = functools.partial(pl.pallas_call, interpret=interpret)
    attend = launch(
        functools.partial(_attend, call),
        out_shape=jax.ShapeDtypeStruct((*grouped, size), q.dtype) if splits == 1 else (part, edge, edge),
        grid=(tiles, batch * kv_heads, splits),
        compiler_params=plgpu.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        name="tree_attention",
    )
    # Which block rows anybody sees: the same in every layer, so a program of many layers computes it once.
    kept = jnp.any(visible_in_block(mask, depths, window), axis=1).astype(jnp.int32)
    words = jax.lax.bitcast_convert_type(mask, jnp.int32)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)
    result = attend(q.reshape(*grouped, size), k, v, words, kept, depths, prefix, sinks)
    if splits > 1:
        width = max(64, min(1024, 4096 // pl.next_power_of_2(splits)))
        merge = launch(
            functools.partial(_merge, width, heads),
            out_shape=jax.ShapeDtypeStruct((q.size,), q.dtype),
            grid=(pl.cdiv(q.size, width),),
            compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
            name="tree_attention_merge",
        )
        part, top, total = result
        result = merge(part.reshape(splits, -1), top.reshape(splits, -1), total.reshape(splits, -1), sinks)
    return result.reshape(batch, rows, heads, size)


@dataclass(frozen=True, slots=True)
class _Call:
    """The static side of a launch."""

    rows: int  # N
    kv_heads: int  # G
    ratio: int  # R
    block_rows: int
    block_keys: int
    splits: int  # Z
    has_prefix: bool
    scale: float  # in base two
    window: int | None
    precision: jax.lax.Precision | None

    def ours(self) -> tuple[Array, Array, Array, Array, Array]:
        """This program's sequence, head and rows: b, g, node and query head of each row, which are real."""
        pair = pl.program_id(1)
        m = pl.program_id(0) * self.block_rows + jnp.arange(self.block_rows, dtype=jnp.int32)
        node = m // self.ratio
        return pair // self.kv_heads, pair % self.kv_heads, node, m % self.ratio, node < self.rows


def _attend(
    call: _Call,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    mask_ref: Any,
    kept_ref: Any,
    depths_ref: Any,
    prefix: Any,  # a PagedPrefix of references, or None
    sinks_ref: Any,
    *out_refs: Any,
) -> None:
    """One program: its rows over its split of the keys."""
    b, g, node, head, real = call.ours()
    split = pl.program_id(2)
    size = q_ref.shape[-1]
    step = jnp.arange(call.block_keys, dtype=jnp.int32)
    q = plgpu.load(q_ref.at[_rows(size, b, node, g, head)], mask=_wide(real, size), other=0.0)
    depth = jnp.zeros((call.block_rows,), jnp.int32)
    if call.window is not None:
        depth = plgpu.load(depths_ref.at[b, node], mask=real, other=jnp.iinfo(jnp.int32).max)

    # Steps of the prefix that a row may see, in units of block_keys, then those of the block.
    first, prefix_steps, length, lowest = (jnp.int32(0),) * 4
    if call.has_prefix:
        length = plgpu.load(prefix.lengths.at[b])
        if call.window is not None:
            lowest = jnp.min(depth)  # the tile's padding stands at the largest depth: it widens nothing
            first = jnp.clip(length + lowest - call.window + 1, 0, length) // call.block_keys
        prefix_steps = pl.cdiv(length, call.block_keys) - first
    total_steps = prefix_steps + pl.cdiv(call.rows, call.block_keys)
    share = pl.cdiv(total_steps, call.splits)
    start = jnp.minimum(split * share, total_steps)
    stop = jnp.minimum(start + share, total_steps)

    def add(carry: tuple, keys: Array, values: Array, visible: Array | None) -> tuple:
        """The running softmax, with one step's keys taken in; without `visible` all are."""
        top, total, out = carry
        scores = plgpu.dot(q, keys, trans_b=True, precision=call.precision)
        if visible is not None:
            scores = jnp.where(visible, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1) * call.scale)
        decay = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * call.scale - new_top[:, None])
        total = total * decay + jnp.sum(weights, axis=1)
        products = plgpu.dot(weights.astype(values.dtype), values, precision=call.precision)
        return new_top, total, out * decay[:, None] + products

    def page_rows(i: Array) -> tuple[Array, ...]:
        """Where the keys of a step of the prefix lie; a step never leaves its page."""
        slot = i * call.block_keys
        page_size = prefix.k_pages.shape[1]
        page = plgpu.load(prefix.block_tables.at[b, slot // page_size])
        return _rows(size, page, slot % page_size + step, g)

    def add_whole_page(i: Array, carry: tuple) -> tuple:
        where = page_rows(i)
        keys, values = plgpu.load(prefix.k_pages.at[where]), plgpu.load(prefix.v_pages.at[where])
        return add(carry, keys, values, None)

    def add_page(i: Array, carry: tuple) -> tuple:
        where = page_rows(i)
        relative = i * call.block_keys - length + step
        seen = relative < 0
        kept, visible = seen, seen[None, :]
        if call.window is not None:
            kept &= relative > lowest - call.window  # by any row of the tile
            visible &= relative[None, :] > depth[:, None] - call.window
        # A hidden key's score is replaced, whatever it is. A hidden value would still be multiplied, by
        # zero, and zero times NaN is NaN: it is not read.
        keys = plgpu.load(prefix.k_pages.at[where])
        values = plgpu.load(prefix.v_pages.at[where], mask=_wide(kept, size), other=0.0)
        return add(carry, keys, values, visible)

    def block_words() -> Array:
        """The mask of the rows, loaded once: what a loop loads takes shared memory from keys and values."""
        column = jnp.arange(pl.next_power_of_2(mask_ref.shape[2]), dtype=jnp.int32)[None, :]
        there = real[:, None] & (column < mask_ref.shape[2])
        return plgpu.load(mask_ref.at[b, node[:, None], column], mask=there, other=0)

    def add_block(words: Array, i: Array, carry: tuple) -> tuple:
        key = i * call.block_keys + step
        inside = key < call.rows
        key = jnp.minimum(key, call.rows - 1)
        visible = _bits(words, i * call.block_keys, call.block_keys) & inside[None, :]
        if call.window is not None:
            key_depth = plgpu.load(depths_ref.at[b, key])
            visible &= key_depth[None, :] > depth[:, None] - call.window
        kept = (plgpu.load(kept_ref.at[b, key]) == 1) & inside
        where = _rows(size, b, key, g)
        keys = plgpu.load(k_ref.at[where])
        values = plgpu.load(v_ref.at[where], mask=_wide(kept, size), other=0.0)
        return add(carry, keys, values, visible)

    carry = (
        jnp.full((call.block_rows,), _FLOOR, jnp.float32),
        jnp.zeros((call.block_rows,), jnp.float32),
        jnp.zeros((call.block_rows, size), jnp.float32),
    )
    if call.has_prefix:
        # Steps that every row sees whole, and those at an edge of the prefix or of a window.
        whole = length // call.block_keys if call.window is None else first
        begin, end = first + start, first + jnp.minimum(stop, prefix_steps)
        middle = jnp.minimum(end, whole)
        carry = _loop(begin, middle, lambda: add_whole_page, carry)
        carry = _loop(jnp.maximum(begin, middle), end, lambda: add_page, carry)
    begin, end = jnp.maximum(start - prefix_steps, 0), stop - prefix_steps
    top, total, out = _loop(begin, end, lambda: functools.partial(add_block, block_words()), carry)

    if call.splits == 1:
        if sinks_ref is not None:
            sink = plgpu.load(sinks_ref.at[g * call.ratio + head])
            top, total, out = _add_sink(sink, top, total, out)
        out = out / _denominator(total)[:, None]
        where = _rows(size, b, node, g, head)
        plgpu.store(out_refs[0].at[where], out.astype(out_refs[0].dtype), mask=_wide(real, size))
        return
    part_ref, top_ref, total_ref = out_refs
    where = split, b, node, g, head
    plgpu.store(part_ref.at[_rows(size, *where)], out, mask=_wide(real, size))
    plgpu.store(top_ref.at[where], top, mask=real)
    plgpu.store(total_ref.at[where], total, mask=real)


def _merge(
    width: int, heads: int, part_ref: Any, top_ref: Any, total_ref: Any, sinks_ref: Any, out_ref: Any
) -> None:
    """Joins the splits of `width` elements: each part is scaled from its own maximum to the common one.

    All splits are loaded side by side, so that memory is waited for once.
    """
    splits, size = part_ref.shape[0], part_ref.shape[1] // top_ref.shape[1]
    split = jnp.arange(pl.next_power_of_2(splits), dtype=jnp.int32)[:, None]
    element = pl.program_id(0) * width + jnp.arange(width, dtype=jnp.int32)
    inside = element < part_ref.shape[1]
    both = (split < splits) & inside[None, :]
    row = element // size
    tops = plgpu.load(top_ref.at[split, row[None, :]], mask=both, other=_FLOOR)
    totals = plgpu.load(total_ref.at[split, row[None, :]], mask=both, other=0.0)
    parts = plgpu.load(part_ref.at[split, element[None, :]], mask=both, other=0.0)
    top = jnp.max(tops, axis=0)
    scale = jnp.exp2(tops - top[None, :])
    total, out = jnp.sum(totals * scale, axis=0), jnp.sum(parts * scale, axis=0)
    if sinks_ref is not None:
        top, total, out = _add_sink(plgpu.load(sinks_ref.at[row % heads]), top, total, out)
    plgpu.store(out_ref.at[element], (out / _denominator(total)).astype(out_ref.dtype), mask=inside)


def _add_sink(sink: Array, top: Array, total: Array, out: Array) -> tuple[Array, Array, Array]:
    """A sink joins the denominator. `out` may have an axis more than the others."""
    new_top = jnp.maximum(top, sink * _LOG2_E)
    decay = jnp.exp2(top - new_top)
    total = total * decay + jnp.exp2(sink * _LOG2_E - new_top)
    return new_top, total, out * (decay if out.ndim == 1 else decay[:, None])


def _denominator(total: Array) -> Array:
    """The softmax's denominator; a row that saw nothing has weights of zero, and stays zero."""
    return jnp.where(total == 0, 1.0, total)


def _loop(begin: Array, end: Array, make_body: Callable[[], Callable[..., tuple]], carry: tuple) -> tuple:
    """A loop whose code is jumped over by programs without a step in it.

    Fetching instructions that run once is a good part of the time of so short a kernel.
    """
    return jax.lax.cond(
        begin < end, lambda x: jax.lax.fori_loop(begin, end, make_body(), x), lambda x: x, carry
    )


def _rows(size: int, *index: Array) -> tuple[Array, ...]:
    """The index of whole rows of `size` elements, where `index` has one entry for each row or for all."""
    lane = jnp.arange(size, dtype=jnp.int32)[None, :]
    return *(part[:, None] if part.ndim else part for part in index), lane


def _bits(words: Array, first: Array, count: int) -> Array:
    """Bits first..first + count of the packed mask in each row of `words`; count is a power of two."""
    lane = jnp.arange(count, dtype=jnp.int32)
    column = jnp.arange(words.shape[1], dtype=jnp.int32)[None, :]
    spread = jnp.zeros((words.shape[0], count), jnp.int32)
    for i in reversed(range(max(1, count // 32))):
        word = jnp.sum(jnp.where(column == first // 32 + i, words, 0), axis=1)
        spread = jnp.where(lane[None, :] < 32 * (i + 1), word[:, None], spread)
    return ((spread >> ((first + lane) % 32)[None, :]) & 1) == 1


def _wide(rows: Array, size: int) -> Array:
    """A condition on rows, for every element of them."""
    return jnp.broadcast_to(rows[:, None], (rows.shape[0], size))
