"""The quantisation of rows in plain JAX: the specification, the test oracle and the fallback."""

import functools
from typing import NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float8e4m3fn, Float32

from pallas_kernels.quantized import FP8, LARGEST, bits_of, of_bits


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def quantize_rows(
    x: Float[Array, "R K"], group: int, length: int
) -> tuple[Float8e4m3fn[Array, "length K"], Float32[Array, "groups length"]]:
    """See `api.quantize_rows`, which explains the shapes and checks them."""
    rows, terms = x.shape
    group = min(group or terms, terms)
    wide, info = x.astype(jnp.float32), jnp.finfo(x.dtype)
    if info.bits == 16:
        # Within a program XLA may leave out that x was rounded; then a row's bits would depend on what
        # computes it.
        wide = jax.lax.reduce_precision(wide, exponent_bits=8, mantissa_bits=info.nmant)
    groups = jnp.pad(wide, ((0, 0), (0, -terms % group))).reshape(rows, -1, group)
    scales = scales_of(groups)
    # In some programs XLA makes this product of a division, and rounds otherwise.
    # And without the barrier it leaves out the rounding to FP8 of a single row, which it widens next.
    values = jax.lax.optimization_barrier((groups * (1 / scales)[:, :, None]).astype(FP8))
    spare = (0, length - rows), (0, 0)
    bits = jnp.pad(bits_of(values).reshape(rows, -1)[:, :terms], spare)
    return of_bits(bits), jnp.pad(scales, spare).T


@quantize_rows.defjvp
def _no_derivatives(*_: object) -> NoReturn:
    raise NotImplementedError("rows quantised in FP8 have no derivatives: load with fp8_activations=False")


def scales_of(groups: Float32[Array, "*groups terms"]) -> Float32[Array, "*groups"]:
    """The scale of each group; in kernels too."""
    # The maximum of floats may pass over NaN, in XLA:CPU's programs and in Triton's. The bits of magnitudes
    # are in the order of the magnitudes, and those of NaN come last.
    bits = jnp.max(jax.lax.bitcast_convert_type(jnp.abs(groups), jnp.int32), axis=-1)
    # XLA replaces a division by a constant in some programs, but not a product.
    scales = jax.lax.bitcast_convert_type(bits, jnp.float32) * jnp.float32(1 / LARGEST)
    # A group with a smaller scale is rounded to zeros, for which any scale will do.
    return jnp.where(scales < jnp.finfo(scales.dtype).tiny, 1, scales)
