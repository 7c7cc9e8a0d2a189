"""The filters' threshold in plain JAX: the specification, the test oracle and the fallback.

Nothing is sorted: a few passes over the logits find a threshold exactly.

If the vocabulary is sharded over devices, each device reads its shard, and a gather after every pass collects
the shards' results. All devices reduce the same gathered bits by the same program, so their thresholds have
the same bits. Padding of -inf has no weight in top-p, and comes last in top-k.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Num, Shaped, UInt32

from pallas_kernels import shards

# Bits of a threshold that one pass over the logits finds, from 2**bits - 1 sums. With more sums XLA:GPU would
# store their terms between two kernels.
_BITS_AT_ONCE = 2


def least_kept(
    logits: Float[Array, "B N V"],
    temperature: Float32[Array, "B"],
    top_k: Int[Array, "B"],
    top_p: Float32[Array, "B"],
    min_p: Float32[Array, "B"],
) -> Float32[Array, "B N"]:
    """See `api.least_kept`, which explains the shapes and checks them."""
    samples = temperature > 0
    by_k, by_p, by_min = samples & (top_k > 0), samples & (top_p < 1), samples & (min_p > 0)
    heat = jnp.where(samples, temperature, 1.0)[:, None]

    def search() -> Float32[Array, "B N"]:
        highest = _of_all_parts(jnp.max, jnp.max(logits, axis=-1)).astype(jnp.float32)

        def weigh() -> Float32[Array, "B N V"]:
            return jnp.exp((logits.astype(jnp.float32) - highest[:, :, None]) / heat[:, :, None])

        def by_top_k() -> Float32[Array, "B N"]:
            # A count of all tokens keeps all of them, because all are at or above -inf.
            most = shards.count() * logits.shape[-1]
            count = jnp.where(by_k, jnp.minimum(top_k, most), most)[:, None]
            if shards.count() > 1:
                # A row of -inf has nothing to drop. The dependence on `highest` orders the gathers: see
                # `shards`.
                count = jnp.where(highest > -jnp.inf, count, most)
            return _threshold(logits, lambda: jnp.ones((1, 1, 1), jnp.int32), count)

        def by_top_p(least: Float32[Array, "B N"]) -> Float32[Array, "B N"]:
            kept = logits.astype(jnp.float32) >= least[:, :, None]
            total = _of_all_parts(jnp.sum, jnp.sum(jnp.where(kept, weigh(), 0), axis=-1))
            found = _threshold(logits, weigh, top_p[:, None] * total)
            # With top_p 1 a float32 sum may reach 1 before the last token, so a slot without top-p keeps its
            # threshold. The maximum prevents that rounding undoes top-k.
            return jnp.where(by_p[:, None], jnp.maximum(found, least), least)

        least = jnp.full(logits.shape[:2], -jnp.inf, jnp.float32)
        least = jax.lax.cond(jnp.any(by_k), by_top_k, lambda: least)
        least = jax.lax.cond(jnp.any(by_p), by_top_p, lambda least: least, least)
        least = jnp.maximum(least, highest + heat * jnp.log(min_p)[:, None])
        filters = (by_k | by_p | by_min)[:, None]
        return jnp.where(filters, jnp.minimum(least, highest), -jnp.inf)

    nothing = jnp.full(logits.shape[:2], -jnp.inf, jnp.float32)
    return jax.lax.cond(jnp.any(by_k | by_p | by_min), search, lambda: nothing)


def _threshold(
    logits: Float[Array, "B N V"],
    weigh: Callable[[], Shaped[Array, "#B #N #V"]],
    goal: Shaped[Array, "B #N"],
) -> Float32[Array, "B N"]:
    """The largest number such that the logits at or above it weigh at least ``goal``; -inf if there is none.

    Floats have the order of the integers with their bits, so a search by a few bits at a time is exact: 8
    reductions for 16-bit logits, 16 for float32, and no sort. Example with weights of 1::

        logits 5. 3. 3. 1.    goal 1 -> 5.    goal 2 -> 3.    goal 3 -> 3.    goal 4 -> 1.

    `weigh` computes the weights, none of them negative, where they are summed: weights computed outside of
    the loop would be stored.
    """
    bits = jnp.finfo(logits.dtype).bits

    def narrow(i: Int[Array, ""], rank: UInt32[Array, "B N"]) -> UInt32[Array, "B N"]:
        step = jnp.uint32(1) << (bits - _BITS_AT_ONCE * (i + 1)).astype(jnp.uint32)
        weights = weigh()
        steps = [
            jnp.where(logits >= float_at(rank + n * step, logits.dtype)[:, :, None], weights, 0)
            for n in range(1, 2**_BITS_AT_ONCE)
        ]
        # XLA:GPU fuses separate sums into one kernel, which reads the logits once. For one reduction of
        # several operands it would store the operands first.
        totals = [jnp.sum(terms, axis=-1) for terms in steps]
        if shards.count() > 1:
            totals = list(_of_all_parts(jnp.sum, jnp.stack(totals)))
        return rank + step * sum((total >= goal).astype(jnp.uint32) for total in totals)

    # A static number of turns, so that the host does not wait for a condition on a GPU.
    rank = jax.lax.fori_loop(0, bits // _BITS_AT_ONCE, narrow, jnp.zeros(logits.shape[:2], jnp.uint32))
    return float_at(rank, logits.dtype).astype(jnp.float32)


def _of_all_parts(
    reduce: Callable[..., Num[Array, "*shape"]], local: Num[Array, "*shape"]
) -> Num[Array, "*shape"]:
    """Reduces the results of all shards of the vocabulary; every device gets the same bits."""
    return reduce(shards.gather(local), axis=0) if shards.count() > 1 else local


def float_at(rank: UInt32[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """The number of a rank in the order of a floating type; ranks beyond the infinities are clipped.

    The bits of positive numbers ascend with the number, those of negative numbers descend::

        rank (16 bits)    0x007F    0x407F    0x7FFF    0x8000    0xBF80    0xFF80
        bits              0xFF80    0xBF80    0x8000    0x0000    0x3F80    0x7F80
        bfloat16            -inf        -1        -0         0         1       inf
    """
    info = jnp.finfo(dtype)
    sign, nans = jnp.uint32(1 << (info.bits - 1)), jnp.uint32((1 << info.nmant) - 1)
    rank = jnp.clip(rank, nans, sign + (sign - 1 - nans))  # there are NaNs at both ends
    pattern = jnp.where(rank >= sign, rank - sign, ~rank)
    return jax.lax.bitcast_convert_type(pattern.astype(f"uint{info.bits}"), dtype)
