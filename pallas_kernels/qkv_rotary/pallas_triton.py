"""Split, norm and rotary on Pallas's Triton backend: one launch that reads the projection once.

A group's heads are two programs, so that even one node makes 2 * G:

    program (row, g, 0)  =  its key, a tile of one head, and its value, which is not rotated
    program (row, g, 1)  =  its R query heads, a tile, if there are any

Pairs of elements are loaded as two tiles: rotary works in place. Elements that have no partner in rotary make
pairs with one another, of angle 0.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float32

from pallas_kernels.norm_weight import weighted

# One 16-byte load of 16-bit floats for each thread and half of its head. A head of common size then lies
# within one warp, which sums its squares without a barrier.
_ELEMENTS_PER_WARP = 256
_MAX_WARPS = 8
# 32 elements of each half in the registers of every thread.
_LARGEST_TILE = 8192


def unsupported(qkv: Array, *_: object) -> str | None:
    """Why the kernel cannot run such a call on any GPU; None if it can."""
    heads, size = qkv.shape[-2:]
    if qkv.size == 0:
        return "qkv has no elements"
    if size & (size - 1) or not 16 <= size <= 512:
        return f"head size {size} is not a power of two in 16..512"
    if _tile(heads, size) > _LARGEST_TILE:
        return f"{heads - 2} query heads of {size} elements are too many for one program"
    return None


def _tile(heads: int, size: int) -> int:
    """Elements of one half of a group's query heads, whose number Triton wants to be a power of two."""
    return pl.next_power_of_2(max(heads - 2, 1)) * size // 2


@functools.partial(jax.jit, static_argnames=("eps", "weight_offset", "norm_values", "interpret"))
def qkv_rotary(
    qkv: Float[Array, "B N G heads E"],
    q_weight: Float[Array, "E"] | None,
    k_weight: Float[Array, "E"] | None,
    cos: Float32[Array, "B N half"],
    sin: Float32[Array, "B N half"],
    *,
    eps: float,
    weight_offset: float | None = None,
    norm_values: bool = False,
    interpret: bool = False,
) -> tuple[Float[Array, "B N G R E"], Float[Array, "B N G E"], Float[Array, "B N G E"]]:
    """See `api.qkv_rotary`. `interpret` runs without a GPU."""
    batch, nodes, groups, heads, size = qkv.shape
    rows, ratio = batch * nodes, heads - 2
    counts = (1, 1, ratio) if ratio else (1, 1)
    warps = _tile(heads, size) // _ELEMENTS_PER_WARP
    launch: Any = pl.pallas_call(
        functools.partial(_qkv_rotary, eps, weight_offset, norm_values),
        out_shape=[jax.ShapeDtypeStruct((rows, groups, count, size), qkv.dtype) for count in counts],
        grid=(rows, groups, 2 if ratio else 1),
        compiler_params=plgpu.CompilerParams(num_warps=min(max(warps, 1), _MAX_WARPS), num_stages=1),
        interpret=interpret,
        name="qkv_rotary",
    )
    angles = cos.reshape(rows, -1), sin.reshape(rows, -1)
    k, v, *q = launch(qkv.reshape(rows, groups, heads, size), q_weight, k_weight, *angles)
    shape = (batch, nodes, groups)
    queries = q[0] if q else jnp.zeros((0,), qkv.dtype)
    return queries.reshape(*shape, ratio, size), k.reshape(*shape, size), v.reshape(*shape, size)


def _qkv_rotary(
    eps: float,
    weight_offset: float | None,
    norm_values: bool,
    qkv_ref: Any,
    q_weight_ref: Any,
    k_weight_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_ref: Any = None,
) -> None:
    """One program: the key and value of a row's group, or its queries."""
    row, g, part = (pl.program_id(i) for i in range(3))
    ratio = qkv_ref.shape[2] - 2

    @pl.when(part == 0)
    def _() -> None:
        lane = jnp.arange(v_ref.shape[3], dtype=jnp.int32)
        value = plgpu.load(qkv_ref.at[row, g, ratio + 1, lane])
        _turn(eps, weight_offset, (row, g), ratio, qkv_ref, k_weight_ref, cos_ref, sin_ref, k_ref)
        if norm_values:
            wide = value.astype(jnp.float32)
            scale = jax.lax.rsqrt(jnp.sum(wide * wide) * (1 / len(lane)) + eps)
            value = (wide * scale).astype(value.dtype)
        plgpu.store(v_ref.at[row, g, 0, lane], value)

    if q_ref is not None:

        @pl.when(part == 1)
        def _() -> None:
            _turn(eps, weight_offset, (row, g), 0, qkv_ref, q_weight_ref, cos_ref, sin_ref, q_ref)


def _turn(
    eps: float,
    weight_offset: float | None,
    group: tuple[Array, Array],
    first_head: int,
    qkv_ref: Any,
    weight_ref: Any,
    cos_ref: Any,
    sin_ref: Any,
    out_ref: Any,
) -> None:
    """Norm and rotary of one row's group, of the heads from `first_head` on, into those of `out_ref`."""
    (row, g), half, count, distance = group, out_ref.shape[3] // 2, out_ref.shape[2], cos_ref.shape[1]
    tile = pl.next_power_of_2(count), half
    # Every index is of the whole tile, so that all loads have its layout, and nothing passes from one
    # layout to another through shared memory.
    head, lane = (jax.lax.broadcasted_iota(jnp.int32, tile, axis) for axis in (0, 1))
    real = None if tile[0] == count else head < count

    # The pairs (i, i + distance), then those of what is not rotated, which lie half a head apart.
    first, second, turned = lane, half + lane, None
    if distance < half:
        turned = lane < distance
        first = jnp.where(turned, lane, lane + distance)
        second = jnp.where(turned, lane + distance, lane + half)

    def pairs(ref: Any, *index: Array, **mask: Any) -> tuple[Array, Array]:
        return plgpu.load(ref.at[*index, first], **mask), plgpu.load(ref.at[*index, second], **mask)

    # All loads come first: none waits for the sums of squares.
    mask = {} if real is None else {"mask": real, "other": 0.0}
    a, b = pairs(qkv_ref, row, g, first_head + head, **mask)
    weights = None if weight_ref is None else pairs(weight_ref)
    cos, sin = (
        plgpu.load(ref.at[row, lane], mask=turned, other=None if turned is None else still)
        for ref, still in ((cos_ref, 1.0), (sin_ref, 0.0))
    )

    dtype = a.dtype
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    if weights is not None:
        squares = jnp.sum(a * a + b * b, axis=1, keepdims=True)
        scale = jax.lax.rsqrt(squares * (0.5 / half) + eps)
        a, b = (
            weighted(x * scale, weight, dtype, offset=weight_offset).astype(jnp.float32)
            for x, weight in zip((a, b), weights, strict=True)
        )
    for place, value in ((first, a * cos - b * sin), (second, b * cos + a * sin)):
        plgpu.store(out_ref.at[row, g, head, place], value.astype(dtype), mask=real)
