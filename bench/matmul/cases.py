"""Inputs of matrix products, chains of them, and their work.

Shapes: M rows, K terms, N columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bench.common.floors import Work
from jetspec_jax.models.quantized import stored_in_order
from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.shapes import MatmulShape
from pallas_kernels.mxfp4 import Mxfp4
from pallas_kernels.quantized import FP8, Quantized, scale_shape
from pallas_kernels.weights import Narrow

SPEC = "bm,mf->bf"
# The scale blocks of Qwen's FP8 checkpoints, and the terms of a row that share a scale.
_BLOCK, _ROW_GROUP = (128, 128), 128
# The calls of a chain read different weights, which together exceed any cache.
_BYTES, _MOST_CALLS = 256 << 20, 32

#: A product by one implementation.
Run = Callable[[Float[Array, "M K"], Array | Narrow], Float[Array, "M N"]]


class Case(NamedTuple):
    """A shape, the format of its weights, and the number of rows."""

    shape: MatmulShape
    stored: str
    rows: int

    def __str__(self) -> str:
        return f"{self.shape.name}, {self.stored}, {self.rows} rows"


def product_by(name: str) -> Run:
    """The product by an implementation of the operation."""
    return lambda x, w: matmul(SPEC, x, w, implementation=name)


def calls_of(shape: MatmulShape, stored: str) -> int:
    """Calls per chain."""
    return max(4, min(_MOST_CALLS, -(-_BYTES // weight_bytes(shape, stored))))


def weight_bytes(shape: MatmulShape, stored: str) -> int:
    """Bytes of the stored weights with their scales; plain weights have 16 bits."""
    size = shape.depth * shape.columns
    if stored == "mxfp4":
        return size // 2 + size // 32
    if stored.startswith("fp8"):
        return size + 4 * int(np.prod(scale_shape((shape.depth, shape.columns), _BLOCK)))
    return 2 * size


def work_of(case: Case) -> Work:
    """The necessary work of a call: it reads the weights and the rows, and writes the outputs."""
    shape, rows = case.shape, case.rows
    moved = weight_bytes(shape, case.stored) + 2 * rows * (shape.depth + shape.columns)
    return Work(moved, 2 * rows * shape.depth * shape.columns)


def random_weights(shape: MatmulShape, stored: str, dtype: jnp.dtype, count: int) -> list[Array | Narrow]:
    """Matrices of random weights, made on the device; scales differ by factors."""
    k, n = shape.depth, shape.columns

    @jax.jit
    def make(key: Array) -> Array | Narrow:
        keys = jax.random.split(key)
        if stored == "mxfp4":
            scales = jax.random.randint(keys[1], (n, k // 32), 116, 122).astype(jnp.uint8)
            return Mxfp4(jax.random.bits(keys[0], (n, k // 32, 16), jnp.uint8), scales, 0)
        weights = jax.random.normal(keys[0], (k, n))
        if stored.startswith("fp8"):
            scales = jnp.exp(jax.random.normal(keys[1], scale_shape((k, n), _BLOCK)))
            group = _ROW_GROUP if stored == "fp8_rows" else None
            return Quantized((32 * weights).astype(FP8), 0.001 * scales, _BLOCK, group)
        return weights.astype(dtype)

    def stored_as_loaded(w: Array | Narrow) -> Array | Narrow:
        if not isinstance(w, Quantized) or w.row_group is None:
            return w
        return replace(w, values=stored_in_order(w.values, (1, 0)))

    return [stored_as_loaded(make(key)) for key in jax.random.split(jax.random.key(0), count)]


def random_rows(rng: np.random.Generator, rows: int, depth: int, dtype: jnp.dtype) -> Float[Array, "M K"]:
    """Normal values."""
    return jnp.asarray(rng.standard_normal((rows, depth), np.float32).astype(dtype))


def chain(run: Run, x: Float[Array, "M K"], weights: Sequence[Array | Narrow]) -> list[Float[Array, "M N"]]:
    """Products with all weights, one after the other: without the barriers XLA would merge them."""
    run = jax.jit(run)  # traced and lowered once, not once per call
    made: list[Array] = []
    for w in weights:
        if made:
            x, made[-1] = jax.lax.optimization_barrier((x, made[-1]))
        made.append(run(x, w))
    return made
