"""Products with weights in plain JAX: the specification, the test oracle and the fallback.

Quantised weights are widened for the product alone, and quantised rows with them. XLA:GPU may write the
widened ones to memory, one product's at a time. XLA:CPU runs ahead and would have those of all products at
once, so there they are widened in parts, by a loop that it keeps; it copies the values' bits before.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.matmul.problem import form_of
from pallas_kernels.quantize_rows.reference import quantize_rows
from pallas_kernels.quantized import Quantized, bits_of, of_bits, scale_shape
from pallas_kernels.weight_tiles import cell_of
from pallas_kernels.weights import Narrow

# Elements of a part. A program keeps room for one of each product.
_PART = 2**20


# One row times a matrix of about this many elements: XLA:GPU writes all terms to memory in float32 and then
# adds them up. Two rows are a product to it, and three times as fast.
_MULTIPLIED_OUT = range(2_000_000, 10_000_000)


def matmul(
    x: Float[Array, "*rows"], w: Float[Array, "*weights"] | Narrow, *, spec: str, wide: bool
) -> Float[Array, "*out"]:
    """See `api.matmul`."""
    if not isinstance(w, Narrow):
        return _product(x, w, spec, wide)

    def product(w: Narrow) -> Array:
        # XLA moves what does not change out of a loop of rounds, and would keep all weights widened there.
        # The barrier makes them depend on the rows, which do change.
        rows, own = jax.lax.optimization_barrier((x, w))
        if isinstance(own, Quantized) and own.row_group is not None:
            return _product_of_quantized(rows, own, own.row_group, spec, wide)
        return _product(rows, own.widened(x.dtype), spec, wide)

    return _in_parts(product, w, spec) if jax.default_backend() == "cpu" else product(w)


def _product(
    x: Float[Array, "*rows"], w: Float[Array, "*weights"], spec: str, wide: bool
) -> Float[Array, "*out"]:
    """The product of rows and weights of one type.

    `jnp.einsum` may list the axes that are summed over in another order than they lie in memory, and XLA:CPU
    would then copy the transposed weights in every call.
    """
    operands, out = spec.split("->")
    axes, others = operands.split(",")
    summed = [axis for axis in axes if axis in others]
    if list(out) != [axis for axis in axes + others if axis not in summed]:
        raise ValueError(f"{spec}: the result must have the rows' axes and then those of the weights")
    contracted = [axes.index(axis) for axis in summed], [others.index(axis) for axis in summed]
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    alone = _is_multiplied_out(spec, x, w)
    if alone:
        x = jnp.concatenate([x, jnp.zeros_like(x)])
    dtype = jnp.float32 if wide else None
    product = jax.lax.dot_general(
        x, w, (contracted, ((), ())), precision=precision, preferred_element_type=dtype
    )
    return product[:1] if alone else product


def _product_of_quantized(
    x: Float[Array, "*rows"], w: Quantized, group: int, spec: str, wide: bool
) -> Float[Array, "*out"]:
    """The product of rows, which are quantised, and quantised weights: group by group of terms.

    A group is as many terms as have the same scales, of a row and of a column. Values are exact in x's type.
    """
    problem = form_of(spec, x, w)
    if isinstance(problem, str):
        raise ValueError(f"{spec}: rows are quantised, and {problem}")
    rows, depth, columns = problem.sizes
    quantized, row_scales = quantize_rows(x.reshape(rows, depth), group, rows)
    values, scales = quantized.astype(x.dtype), problem.scales_matrix(w.scales)
    bits = bits_of(w.values).reshape(depth, columns)
    cells = cell_of(jnp.arange(columns), problem.columns, problem.columns_block)
    size = min(math.gcd(problem.depth_run, group) or depth, depth)

    def add(i: Array, sums: Array) -> Array:
        # A last group of fewer terms is read with terms before it, which count as zeros.
        first, start = i * size, jnp.minimum(i * size, depth - size)
        own = jax.lax.dynamic_slice_in_dim(values, start, size, 1)
        own = jnp.where(start + jnp.arange(size)[None] >= first, own, 0)
        weights = of_bits(jax.lax.dynamic_slice_in_dim(bits, start, size, 0)).astype(x.dtype)
        by_row = row_scales[first // group if group else 0, :, None]
        by_column = scales[cell_of(first, problem.depth, problem.depth_block)][None, cells]
        return sums + _product(own, weights, "rk,kc->rc", True) * by_row * by_column.astype(jnp.float32)

    zeros, count = jnp.zeros((rows, columns), jnp.float32), -(-depth // size)
    sums = add(jnp.int32(0), zeros) if count == 1 else jax.lax.fori_loop(0, count, add, zeros)
    out = sums.reshape(*x.shape[: x.ndim - len(problem.depth)], *problem.columns)
    return out if wide else out.astype(x.dtype)


def _is_multiplied_out(spec: str, x: Array, w: Array) -> bool:
    """Whether XLA would write out all the terms of this product."""
    axes, others = spec.split("->")[0].split(",")
    terms = math.prod(size for axis, size in zip(axes, x.shape, strict=True) if axis in others)
    # XLA counts the terms of both sides: of the row, and of the weights.
    return x.size == terms and w.size + terms in _MULTIPLIED_OUT and jax.default_backend() == "gpu"


def _in_parts(product: Callable[[Narrow], Array], w: Narrow, spec: str) -> Array:
    """A product as parts of its columns, along the axis that has the most blocks of them."""
    operands, out_axes = spec.split("->")
    axes, cells = operands.split(",")[1], scale_shape(w.shape, w.block)
    axis: int = max((i for i, name in enumerate(axes) if name in out_axes), key=lambda i: cells[i])
    # Of a part, in blocks; and how many parts are whole.
    size = -(-cells[axis] // -(-w.size // _PART))
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
