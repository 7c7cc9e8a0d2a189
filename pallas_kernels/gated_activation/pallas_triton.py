"""The gated activation on Pallas's Triton backend: a program per row and chunk of its features."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from pallas_kernels.activation import Activation, kernel_swish

# One 16-byte load of 16-bit floats for each thread and half: short programs, and many even of one row.
_CHUNK = 1024
_WARPS = 4


def unsupported(gate_up: Array) -> str | None:
    """Why the kernel cannot run such a call on any GPU; None if it can."""
    return None if gate_up.size else "gate_up has no elements"


@functools.partial(jax.jit, static_argnames=("activation", "interpret"))
def gated_activation(
    gate_up: Float[Array, "*rows 2 F"], *, activation: Activation, interpret: bool = False
) -> Float[Array, "*rows F"]:
    """See `api.gated_activation`. `interpret` runs without a GPU."""
    *shape, _, features = gate_up.shape
    rows = math.prod(shape)
    launch: Any = pl.pallas_call(
        functools.partial(_gated_activation, activation),
        out_shape=jax.ShapeDtypeStruct((rows, features), gate_up.dtype),
        grid=(rows, pl.cdiv(features, _CHUNK)),
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="gated_activation",
    )
    return launch(gate_up.reshape(rows, 2, features)).reshape(*shape, features)


def _gated_activation(activation: Activation, gate_up_ref: Any, out_ref: Any) -> None:
    """One program: one chunk of one row."""
    row, features = pl.program_id(0), out_ref.shape[1]
    lane = pl.program_id(1) * _CHUNK + jnp.arange(_CHUNK, dtype=jnp.int32)
    real = None if features % _CHUNK == 0 else lane < features
    gate, up = (plgpu.load(gate_up_ref.at[row, i, lane], mask=real).astype(jnp.float32) for i in (0, 1))
    gated = activation(gate, up, swish=kernel_swish)
    plgpu.store(out_ref.at[row, lane], gated.astype(out_ref.dtype), mask=real)
