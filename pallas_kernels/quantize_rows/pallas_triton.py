"""The quantisation of rows on Pallas's Triton backend: a program per row and some groups of its terms.

Its arithmetic is the reference's, operation by operation, so that both give the same bits, but for those of
NaN. Rows after R are not written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from pallas_kernels.dispatch import fp8_problem
from pallas_kernels.quantize_rows.reference import scales_of
from pallas_kernels.quantized import FP8

# One 16-byte load of 16-bit floats for each thread: short programs, and many even of one row.
_CHUNK = 1024
_ELEMENTS_PER_WARP = 256
_MAX_WARPS = 16
# A group stays in registers from its maximum to its values.
_LONGEST_GROUP = 16384


def unsupported(x: Array, group: int) -> str | None:
    """Why the kernel cannot run such a call; None if it can."""
    if x.size == 0:
        return "x has no elements"
    if problem := fp8_problem():
        return problem
    terms = x.shape[1]
    group = min(group or terms, terms)
    if group > _LONGEST_GROUP:
        return f"groups of {group} terms are longer than {_LONGEST_GROUP}"
    if group < terms and group & (group - 1):
        return f"groups of {group} terms, no power of two"
    return None


@functools.partial(jax.jit, static_argnames=("group", "length", "interpret"))
def quantize_rows(
    x: Float[Array, "R K"], *, group: int, length: int, interpret: bool = False
) -> tuple[Float8e4m3fn[Array, "length K"], Float32[Array, "groups length"]]:
    """See `api.quantize_rows`. `interpret` runs without a GPU."""
    rows, terms = x.shape
    group = min(group or terms, terms)
    groups, lanes = pl.cdiv(terms, group), pl.next_power_of_2(group)
    block = min(max(_CHUNK // lanes, 1), pl.next_power_of_2(groups)), lanes
    launch: Any = pl.pallas_call(
        functools.partial(_quantize_rows, group, block, interpret),
        out_shape=(
            jax.ShapeDtypeStruct((length, terms), FP8),
            jax.ShapeDtypeStruct((groups, length), jnp.float32),
        ),
        grid=(rows, pl.cdiv(groups, block[0])),
        compiler_params=plgpu.CompilerParams(
            num_warps=min(max(block[0] * lanes // _ELEMENTS_PER_WARP, 1), _MAX_WARPS), num_stages=1
        ),
        interpret=interpret,
        name="quantize_rows",
    )
    return launch(x)


def _quantize_rows(
    group: int, block: tuple[int, int], interpret: bool, x_ref: Any, values_ref: Any, scales_ref: Any
) -> None:
    """One program: some groups of one row."""
    row, terms, groups = pl.program_id(0), x_ref.shape[1], scales_ref.shape[0]
    indices = pl.program_id(1) * block[0] + jnp.arange(block[0], dtype=jnp.int32)
    term = indices[:, None] * group + jnp.arange(block[1], dtype=jnp.int32)[None, :]
    # Only a group that is the whole row may have lanes beyond it.
    real = None if terms % (block[0] * block[1]) == 0 else term < terms
    other = None if real is None else 0.0
    x = plgpu.load(x_ref.at[row, term], mask=real, other=other).astype(jnp.float32)
    scales = scales_of(x)
    inverse = 1 / scales if interpret else _reciprocal(scales)
    values = (x * inverse[:, None]).astype(FP8)
    plgpu.store(values_ref.at[row, term], values, mask=real)
    plgpu.store(
        scales_ref.at[indices, row], scales, mask=None if groups % block[0] == 0 else indices < groups
    )


def _reciprocal(x: Float32[Array, "*shape"]) -> Float32[Array, "*shape"]:
    """Rounded to the nearest, as Triton's division is not."""
    [found] = plgpu.elementwise_inline_asm(
        "rcp.rn.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return found
