"""The filters' threshold on Pallas's Triton backend: a program per row, which reads the row a few times.

A program whose row has no filter only reads its settings. This is the reason for a kernel: XLA reads a
condition on the host, which drains the GPU's queue in every round.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32, Int

from pallas_kernels import shards
from pallas_kernels.token_filter.reference import float_at

_CHUNK = 4096  # entries of a row that a program holds in registers at once
_BITS_AT_ONCE = 2
_FLOAT32 = jnp.dtype(jnp.float32)


def unsupported(*_: object) -> str | None:
    """Why the kernel cannot run such a call on any GPU; None if it can."""
    if shards.count() > 1:
        return f"it sums over whole rows, and {shards.count()} devices each hold a part of them"
    return None


def least_kept(
    logits: Float[Array, "B N V"],
    temperature: Float32[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float32[Array, "B"],
    min_p: Float32[Array, "B"],
    *,
    interpret: bool = False,
) -> Float32[Array, "B N"]:
    """See `api.least_kept`. `interpret` runs without a GPU."""
    launch: Any = pl.pallas_call(
        _least_kept,
        out_shape=jax.ShapeDtypeStruct(logits.shape[:2], jnp.float32),
        grid=logits.shape[:2],
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=2),
        interpret=interpret,
        name="token_filter",
    )
    return launch(logits, temperature, top_k, top_p, min_p)


def _least_kept(
    logits_ref: Any, temperature_ref: Any, top_k_ref: Any, top_p_ref: Any, min_p_ref: Any, out_ref: Any
) -> None:
    """One program: the threshold of one row."""
    b, n = pl.program_id(0), pl.program_id(1)
    temperature, top_k, top_p, min_p = (
        plgpu.load(ref.at[b]) for ref in (temperature_ref, top_k_ref, top_p_ref, min_p_ref)
    )
    filters = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    fold = functools.partial(_fold, logits_ref, b, n)
    least = _when(
        filters,
        lambda _: _search(fold, logits_ref, temperature, top_k, top_p, min_p),
        jnp.float32(-jnp.inf),
    )
    plgpu.store(out_ref.at[b, n], least)


def _when(condition: Array, change: Callable[[Array], Array], value: Array) -> Array:
    """`change(value)` under a condition, else `value`, as a loop of one turn or none.

    The Triton backend's `lax.cond` takes no branch that returns a constant.
    """
    return jax.lax.fori_loop(0, condition.astype(jnp.int32), lambda _, x: change(x), value)


def _search(
    fold: Callable[..., tuple[Array, ...]],
    logits_ref: Any,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
) -> Array:
    """The least logit that top-k, then top-p, then min-p keep."""
    lowest = jnp.full((_CHUNK,), -jnp.inf, jnp.float32)
    (tops,) = fold(lambda x, best: (jnp.maximum(best, x),), (lowest,))
    highest = jnp.max(tops)
    rate = math.log2(math.e) / temperature

    def weigh(x: Array) -> Array:
        return jnp.exp2((x - highest) * rate)

    def by_top_k(_: Array) -> Array:
        vocab = jnp.float32(logits_ref.shape[2])  # exact: no vocabulary has 2**24 entries
        goal = jnp.minimum(top_k.astype(jnp.float32), vocab)
        return _threshold(fold, logits_ref.dtype, jnp.ones_like, goal)

    def by_top_p(least: Array) -> Array:
        zeros = jnp.zeros((_CHUNK,), jnp.float32)
        (kept,) = fold(lambda x, total: (total + jnp.where(x >= least, weigh(x), 0.0),), (zeros,))
        found = _threshold(fold, logits_ref.dtype, weigh, top_p * jnp.sum(kept))
        return jnp.maximum(found, least)  # rounding must not undo top-k

    least = _when(top_k > 0, by_top_k, jnp.float32(-jnp.inf))
    least = _when(top_p < 1, by_top_p, least)
    least = jnp.maximum(least, highest + temperature * jnp.log(min_p))
    return jnp.minimum(least, highest)


def _threshold(
    fold: Callable[..., tuple[Array, ...]], dtype: jnp.dtype, weigh: Callable[[Array], Array], goal: Array
) -> Array:
    """The largest number such that the logits at or above it weigh at least `goal`: see the reference."""
    # The upper half of a float32 is a bfloat16, in the same order.
    bits = 16 if dtype == jnp.bfloat16 else 32

    def narrow(i: Array, rank: Array) -> Array:
        step = jnp.uint32(1) << (32 - _BITS_AT_ONCE * (i + 1)).astype(jnp.uint32)
        edges = [float_at(rank + jnp.uint32(n) * step, _FLOAT32) for n in range(1, 2**_BITS_AT_ONCE)]

        def add(x: Array, *totals: Array) -> tuple[Array, ...]:
            weights = weigh(x)
            return tuple(
                total + jnp.where(x >= edge, weights, 0.0) for total, edge in zip(totals, edges, strict=True)
            )

        totals = fold(add, tuple(jnp.zeros((_CHUNK,), jnp.float32) for _ in edges))
        for total in totals:
            rank += step * (jnp.sum(total) >= goal).astype(jnp.uint32)
        return rank

    return float_at(jax.lax.fori_loop(0, bits // _BITS_AT_ONCE, narrow, jnp.uint32(0)), _FLOAT32)


def _fold(
    logits_ref: Any, b: Array, n: Array, add: Callable[..., tuple[Array, ...]], start: tuple[Array, ...]
) -> tuple[Array, ...]:
    """Folds a row chunk by chunk, padded with -inf."""
    vocab = logits_ref.shape[2]

    def step(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        index = i * _CHUNK + jnp.arange(_CHUNK, dtype=jnp.int32)
        x = plgpu.load(logits_ref.at[b, n, index], mask=index < vocab, other=-jnp.inf)
        return add(x.astype(jnp.float32), *carry)

    return jax.lax.fori_loop(0, pl.cdiv(vocab, _CHUNK), step, start)
