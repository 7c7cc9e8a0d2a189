"""Attention of a draft head's blocks in training, a chunk of scores at a time.

All scores of a layer would be a row for each slot and a column for each token: 34 GB at 512 blocks of 16
slots, 32 heads and a sequence of 32,768 tokens. So scores are computed per chunk of slots and chunk of
tokens, and the backward pass recomputes them. A chunk of slots skips tokens that none of its blocks attends
to; anchors are in order, so with packed documents it skips most tokens.

Shapes: B sequences, T tokens, A anchors of a sequence, K slots of a block, H heads, G KV heads, R = H / G,
E head size, C tokens of a chunk. ``starts`` is the first token of each anchor's document.

Source: the online softmax and its gradient of FlashAttention (Dao et al., arXiv 2205.14135).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from jetspec_jax.models.layers import KV, Attend

#: Slots and tokens of a chunk of scores.
SLOTS, TOKENS = 1024, 1024

State = TypeVar("State")


def block_attend(
    context: tuple[KV, ...],
    anchors: Int[Array, "B A"],
    block_size: int,
    *,
    causal: bool,
    starts: Int[Array, "B A"] | None = None,
) -> Attend:
    """Attention of the slots of many blocks to the context before the block's anchor and to the block.

    Args:
        context: Per layer, keys and values of all T tokens of the sequence.
        anchors: Index in the sequence of each block's anchor.
        block_size: Slots per block; queries come as ``[B, A * block_size, H, E]``, block after block.
        causal: Whether slot j of a block attends to the block's slots up to j only.
        starts: Where the anchors' documents begin in packed sequences; None is the sequence's beginning.
    """
    begins = jnp.zeros_like(anchors) if starts is None else starts

    def attend(
        layer: int,
        q: Float[Array, "B N H E"],
        kv: KV,
        *,
        scale: float,
        window: int | None,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B N H E"]:
        if window is not None or sinks is not None:
            raise ValueError("a draft head has neither sliding-window layers nor sinks")
        before = context[layer]
        blocks, groups = (*anchors.shape, block_size), before.k.shape[2]
        queries = jnp.reshape(q, (*blocks, groups, -1, q.shape[3])).transpose(0, 3, 1, 2, 4, 5)
        k, v = (jnp.reshape(x, (*blocks, groups, -1)).transpose(0, 3, 1, 2, 4) for x in (kv.k, kv.v))
        keys, values = (jnp.swapaxes(x, 1, 2) for x in (before.k, before.v))
        how = _How(scale, causal)
        out: Any = _attention(how, _Blocks(queries, k, v, begins, anchors), keys, values)
        return out.transpose(0, 2, 3, 1, 4, 5).reshape(q.shape)

    return attend


class _How(NamedTuple):
    scale: float
    causal: bool


class _Blocks(NamedTuple):
    """Blocks, or a chunk of them.

    Attributes:
        q: Queries.
        k: Keys of the block's slots.
        v: Values of the block's slots.
        begins: The first context token.
        ends: The anchor, the token after the last context token.
    """

    q: Float[Array, "B G A K R E"]
    k: Float[Array, "B G A K E"]
    v: Float[Array, "B G A K E"]
    begins: Int[Array, "B A"]
    ends: Int[Array, "B A"]


class _Softmax(NamedTuple):
    """A softmax in progress, and its weighted sum of values."""

    top: Float32[Array, "B G A K R"]
    total: Float32[Array, "B G A K R"]
    out: Float32[Array, "B G A K R E"]


def visible(
    begins: Int[Array, "B A"], ends: Int[Array, "B A"], first: int | Int[Array, ""], count: int
) -> Bool[Array, "B A {count}"]:
    """Mask of the context: which of ``count`` tokens from ``first`` on each block attends to.

    Documents of 3 and 4 tokens side by side; anchors at 2, 3 and 5::

        anchor 2   x x . . . . .
        anchor 3   . . . . . . .
        anchor 5   . . . x x . .
    """
    tokens = first + jnp.arange(count)[None, None, :]
    return (tokens >= begins[:, :, None]) & (tokens < ends[:, :, None])


def visible_in_block(block_size: int, *, causal: bool) -> Bool[Array, "{block_size} {block_size}"]:
    """Mask within a block: a slot attends to all slots, or with a causal head to those up to itself.

    Causal, 3 slots::

        x . .
        x x .
        x x x
    """
    return jnp.tri(block_size, dtype=bool) if causal else jnp.ones((block_size, block_size), bool)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: _How, blocks: _Blocks, keys: Array, values: Array) -> Array:
    return _forward(how, blocks, keys, values)[0]


def _forward(
    how: _How, blocks: _Blocks, keys: Array, values: Array
) -> tuple[Float[Array, "B G A K R E"], tuple[Any, ...]]:
    """The output, and the residuals for the backward pass."""
    size = _chunk(keys)
    padded = tuple(_pad_tokens(x, size) for x in (keys, values))

    def of_chunk(part: tuple[_Blocks, Array]) -> tuple[Array, Array]:
        blocks, reach = part
        scores = _block_scores(how, blocks)
        top = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - top[..., None])
        mixed = _product("bgakrj,bgaje->bgakre", weights.astype(blocks.v.dtype), blocks.v)
        state = _Softmax(top, jnp.sum(weights, axis=-1), mixed)

        def step(number: int | Array, state: _Softmax) -> _Softmax:
            some, mixed = (_slice(x, number, size) for x in padded)
            scores = _scores(how, blocks, some, number * size)
            top = jnp.maximum(state.top, jnp.max(scores, axis=-1))
            kept, weights = jnp.exp(state.top - top), jnp.exp(scores - top[..., None])
            added = _product("bgakrt,bgte->bgakre", weights.astype(mixed.dtype), mixed)
            total = kept * state.total + jnp.sum(weights, axis=-1)
            return _Softmax(top, total, kept[..., None] * state.out + added)

        state = _over_tokens(step, reach, padded[0].shape[2] // size, state)
        out = state.out / state.total[..., None]
        return out.astype(blocks.q.dtype), state.top + jnp.log(state.total)

    parts = _parts(blocks, size)
    out, norms = jax.lax.map(of_chunk, parts)
    out, norms = (_joined(x, blocks.q.shape[2]) for x in (out, norms))
    return out, (blocks, keys, values, out, norms)


def _backward(how: _How, saved: tuple[Any, ...], given: Array) -> tuple[Any, ...]:
    blocks, keys, values, out, norms = saved
    size = _chunk(keys)
    padded = tuple(_pad_tokens(x, size) for x in (keys, values))
    # The mean gradient of each row of scores: the sum of the row's weights times their gradients.
    mean = jnp.sum(given.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)

    def of_chunk(sums: tuple[Array, Array], part: tuple[Any, ...]) -> tuple[tuple[Array, Array], Any]:
        (blocks, reach), given, norm, mean = part

        def of_scores(scores: Array, values: Array, spec: str) -> tuple[Array, Array]:
            """The softmax weights of scores, and the scores' gradient, both in the products' dtype."""
            weights = jnp.exp(scores - norm[..., None])
            pull = weights * (_product(spec, given, values) - mean[..., None])
            return weights.astype(given.dtype), (how.scale * pull).astype(given.dtype)

        weights, pull = of_scores(_block_scores(how, blocks), blocks.v, "bgakre,bgaje->bgakrj")
        dv = _product("bgakrj,bgakre->bgaje", weights, given)
        dk = _product("bgakrj,bgakre->bgaje", pull, blocks.q)
        dq = _product("bgakrj,bgaje->bgakre", pull, blocks.k)

        def step(number: int | Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq, dkeys, dvalues = state
            some, mixed = (_slice(x, number, size) for x in padded)
            scores = _scores(how, blocks, some, number * size)
            weights, pull = of_scores(scores, mixed, "bgakre,bgte->bgakrt")
            dq += _product("bgakrt,bgte->bgakre", pull, some)
            dkeys = _add(dkeys, _product("bgakrt,bgakre->bgte", pull, blocks.q), number, size)
            dvalues = _add(dvalues, _product("bgakrt,bgakre->bgte", weights, given), number, size)
            return dq, dkeys, dvalues

        dq, dkeys, dvalues = _over_tokens(step, reach, padded[0].shape[2] // size, (dq, *sums))
        return (dkeys, dvalues), tuple(x.astype(blocks.q.dtype) for x in (dq, dk, dv))

    anchors = blocks.q.shape[2]
    parts = _parts(blocks, size)
    # Drops the gradients of the last block's repetitions.
    rows = tuple(
        _split(x, 2, parts[0].q.shape[3], mode=mode)
        for x, mode in ((given, "constant"), (norms, "edge"), (mean, "constant"))
    )
    zeros = jnp.zeros(padded[0].shape, jnp.float32)
    (dkeys, dvalues), gradients = jax.lax.scan(of_chunk, (zeros, zeros), (parts, *rows))
    dq, dk, dv = (_joined(x, anchors) for x in gradients)
    dkeys, dvalues = (x[:, :, : keys.shape[2]].astype(keys.dtype) for x in (dkeys, dvalues))
    integers: Any = None
    return _Blocks(dq, dk, dv, integers, integers), dkeys, dvalues


_attention.defvjp(_forward, _backward)


def _product(spec: str, x: Array, y: Array) -> Array:
    """A product in its operands' dtype, accumulated in float32; float32 operands keep full precision."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, y, precision=precision, preferred_element_type=jnp.float32)


def _block_scores(how: _How, blocks: _Blocks) -> Float32[Array, "B G A K R K"]:
    """Scores of slots against the slots of their block; each row has at least the slot itself."""
    scores = how.scale * _product("bgakre,bgaje->bgakrj", blocks.q, blocks.k)
    seen = visible_in_block(blocks.q.shape[3], causal=how.causal)[None, None, None, :, None, :]
    return jnp.where(seen, scores, jnp.finfo(jnp.float32).min)


def _scores(
    how: _How, blocks: _Blocks, keys: Float[Array, "B G C E"], first: int | Int[Array, ""]
) -> Float32[Array, "B G A K R C"]:
    """Scores of slots against the tokens from ``first`` on."""
    scores = how.scale * _product("bgakre,bgte->bgakrt", blocks.q, keys)
    seen = visible(blocks.begins, blocks.ends, first, keys.shape[2])[:, None, :, None, None, :]
    return jnp.where(seen, scores, jnp.finfo(jnp.float32).min)


def _chunk(keys: Float[Array, "B G T E"]) -> int:
    """Tokens per chunk: equal chunks of at most `TOKENS`."""
    length = keys.shape[2]
    return -(-length // -(-length // TOKENS))


def _pad_tokens(x: Float[Array, "B G T E"], size: int) -> Float[Array, "B G T2 E"]:
    """The tokens, padded to whole chunks; the mask excludes the padding."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % size), (0, 0)))


def _slice(x: Float[Array, "B G T E"], number: int | Array, size: int) -> Float[Array, "B G C E"]:
    return jax.lax.dynamic_slice_in_dim(x, number * size, size, axis=2)


def _add(x: Float[Array, "B G T E"], part: Array, number: int | Array, size: int) -> Float[Array, "B G T E"]:
    return jax.lax.dynamic_update_slice_in_dim(x, _slice(x, number, size) + part, number * size, axis=2)


def _over_tokens(
    step: Callable[[int | Array, State], State], reach: Int[Array, "2"], chunks: int, state: State
) -> State:
    """Runs a step over the chunks of tokens that some slot attends to."""
    return step(0, state) if chunks == 1 else jax.lax.fori_loop(reach[0], reach[1], step, state)


def _parts(blocks: _Blocks, size: int) -> tuple[_Blocks, Int[Array, "parts 2"]]:
    """Chunks of blocks, and for each the first token chunk that it attends to and the one after the last."""
    anchors, slots = blocks.q.shape[2:4]
    count = -(-anchors * slots // max(SLOTS, slots))
    each = -(-anchors // count)
    parts = _Blocks(*(_split(x, 1 if x.ndim == 2 else 2, each) for x in blocks))
    # The range covers all sequences, so that all devices of a mesh run the same loop.
    first = jnp.min(parts.begins, axis=(1, 2)) // size
    end = -(-jnp.max(parts.ends, axis=(1, 2)) // size)
    return parts, jnp.stack([first, jnp.maximum(end, first)], axis=1)


def _split(x: Array, axis: int, size: int, *, mode: str = "edge") -> Array:
    """Chunks along an axis, as a first axis; the last chunk is filled up with copies of the last block.

    Copies, not zeros: a block at 0 would make its chunk read from the first token on.
    """
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, widths, mode=mode)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


def _joined(x: Array, anchors: int) -> Array:
    """The chunks of `_split` along their third axis, without the repeated blocks."""
    x = jnp.moveaxis(x, 0, 2)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :anchors]
