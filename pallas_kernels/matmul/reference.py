"""Products with quantised weights in plain JAX: the specification, the test oracle and the fallback.

The weights are widened for the product alone. XLA:GPU may write the widened ones to memory, one product's at
a time. XLA:CPU runs ahead and would have those of all products at once, so there they are widened in parts,
by a loop that it keeps; it copies the values' bits before.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.quantized import Quantized, scale_shape

# Elements of a part. A program keeps room for one of each product.
_PART = 2**20


def matmul(x: Float[Array, "*rows"], w: Quantized, *, spec: str, wide: bool) -> Float[Array, "*out"]:
    """See `api.matmul`."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    dtype = jnp.float32 if wide else None

    def product(w: Quantized) -> Array:
        # XLA moves what does not change out of a loop of rounds, and would keep all weights widened there.
        # The barrier makes them depend on the rows, which do change.
        rows, values = jax.lax.optimization_barrier((x, w.values))
        own = Quantized(values, w.scales, w.block).widened(x.dtype)
        return jnp.einsum(spec, rows, own, precision=precision, preferred_element_type=dtype)

    return _in_parts(product, w, spec) if jax.default_backend() == "cpu" else product(w)


def _in_parts(product: Callable[[Quantized], Array], w: Quantized, spec: str) -> Array:
    """A product as parts of its columns, along the axis that has the most blocks of them."""
    operands, out_axes = spec.split("->")
    axes, cells = operands.split(",")[1], scale_shape(w.shape, w.block)
    axis: int = max((i for i, name in enumerate(axes) if name in out_axes), key=lambda i: cells[i])
    # Of a part, in blocks; and how many parts are whole.
    size = -(-cells[axis] // -(-w.values.size // _PART))
    count = w.shape[axis] // (size * w.block[axis])
    if size >= cells[axis]:
        return product(w)

    def part(i: Array) -> Array:
        return product(w.cut(axis, i * size, size))

    # Computed again for derivatives, which would otherwise keep all parts widened.
    parts = jax.lax.map(jax.checkpoint(part), jnp.arange(count))
    place = out_axes.index(axes[axis])
    joined = jnp.moveaxis(parts, 0, place)
    joined = joined.reshape(*joined.shape[:place], -1, *joined.shape[place + 2 :])
    if count * size == cells[axis]:
        return joined
    last = w.cut(axis, count * size, cells[axis] - count * size)
    return jnp.concatenate([joined, product(last)], axis=place)
