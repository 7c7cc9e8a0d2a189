"""RMS norm on Pallas's Triton backend: a program per row, which it reads once."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.norm_weight import weighted

# A row stays in registers from its sum of squares to its product with the weight.
_LONGEST_ROW = 16384
# One 16-byte load of 16-bit floats for each thread and array. Rows as few as a tree's nodes leave the device
# idle: what counts is how long one program takes, and the shorter its code, the sooner it is fetched.
_ELEMENTS_PER_WARP = 256
_MAX_WARPS = 16


def unsupported(x: Array, *_: object) -> str | None:
    """Why the kernel cannot run such a call on any GPU; None if it can."""
    if x.size == 0:
        return "x has no elements"
    if x.shape[-1] > _LONGEST_ROW:
        return f"rows of {x.shape[-1]} elements are longer than {_LONGEST_ROW}"
    return None


@functools.partial(jax.jit, static_argnames=("eps", "weight_offset", "weight_scale", "interpret"))
def rms_norm(
    x: Float[Array, "*rows M"],
    weight: Float[Array, "M"],
    delta: Float[Array, "*rows M"] | None,
    *,
    eps: float,
    weight_offset: float | None = None,
    weight_scale: float = 1.0,
    interpret: bool = False,
) -> tuple[Float[Array, "*rows M"], Float[Array, "*rows M"]]:
    """See `api.rms_norm`. `interpret` runs without a GPU."""
    size = x.shape[-1]
    rows = math.prod(x.shape[:-1])
    out = jax.ShapeDtypeStruct((rows, size), x.dtype)
    block = pl.next_power_of_2(size)
    multiply = functools.partial(weighted, dtype=x.dtype, offset=weight_offset, scale=weight_scale)
    launch: Any = pl.pallas_call(
        functools.partial(_rms_norm, block, eps, multiply),
        out_shape=(out,) if delta is None else (out, out),
        grid=(rows,),
        compiler_params=plgpu.CompilerParams(
            num_warps=min(max(block // _ELEMENTS_PER_WARP, 1), _MAX_WARPS), num_stages=1
        ),
        interpret=interpret,
        name="rms_norm",
    )
    flat_delta = None if delta is None else delta.reshape(rows, size)
    normed, *total = launch(x.reshape(rows, size), weight, flat_delta)
    return normed.reshape(x.shape), total[0].reshape(x.shape) if total else x


def _rms_norm(
    block: int,
    eps: float,
    multiply: Callable[[Array, Array], Array],
    x_ref: Any,
    weight_ref: Any,
    delta_ref: Any,
    *out_refs: Any,
) -> None:
    """One program: one row."""
    row, size = pl.program_id(0), x_ref.shape[1]
    lane = jnp.arange(block, dtype=jnp.int32)
    real = None if block == size else lane < size
    load = functools.partial(plgpu.load, mask=real, other=None if real is None else 0.0)
    # All loads come first: none waits for the sum of squares.
    total, weight = load(x_ref.at[row, lane]), load(weight_ref.at[lane])
    if delta_ref is not None:
        total += load(delta_ref.at[row, lane])
        plgpu.store(out_refs[1].at[row, lane], total, mask=real)
    y = total.astype(jnp.float32)
    y *= jax.lax.rsqrt(jnp.sum(y * y) * (1 / size) + eps)
    plgpu.store(out_refs[0].at[row, lane], multiply(y, weight), mask=real)
