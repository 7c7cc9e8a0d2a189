"""Compares matrix products with float64, within a bound that one wrong scale exceeds."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.common.programs import UNCOMPILABLE, compile_together
from bench.matmul.cases import product_by, random_rows, random_weights
from jetspec_jax.progress import Progress
from pallas_kernels.matmul.shapes import MatmulShape
from pallas_kernels.quantize_rows import quantize_rows
from pallas_kernels.quantized import Quantized
from pallas_kernels.weights import Narrow

#: The largest error of an output, divided by the sum of its terms' magnitudes.
BOUND = 2.0**-8
# Columns per float64 product.
_COLUMNS = 2048


class MatmulCheck(NamedTuple):
    """A comparison, the largest error divided by the sum of the terms' magnitudes, and the fault or None."""

    shape: str
    stored: str
    dtype: str
    rows: int
    error: float
    problem: str | None

    def __str__(self) -> str:
        return f"{self.shape}, {self.stored}, {self.dtype}, {self.rows} rows"


def check_products(
    shape: MatmulShape, stored: str, dtype: jnp.dtype, counts: Sequence[int], name: str, seed: int
) -> list[MatmulCheck]:
    """Compares products of the first rows of one matrix, for each number of rows."""
    rows = random_rows(np.random.default_rng(seed), max(counts), shape.depth, dtype)
    [w] = random_weights(shape, stored, dtype, 1)
    with Progress(total=len(counts), desc=f"check {shape.name}, {stored}", unit="step") as bar:
        jobs = [(product_by(name), (rows[:count], w)) for count in counts]
        programs = compile_together(jobs, bar.update)
    exact, magnitudes = _in_float64(_as_multiplied(rows, w), w)
    found = []
    for count, program, (_, arguments) in zip(counts, programs, jobs, strict=True):
        error, problem = float("inf"), None
        try:
            if isinstance(program, Exception):
                raise program
            out, again = (np.asarray(program(*arguments)) for _ in range(2))
        except UNCOMPILABLE as failure:
            problem = f"does not run: {failure}"
        else:
            error, problem = judge(out, again, exact[:count], magnitudes[:count])
        found.append(MatmulCheck(shape.name, stored, dtype.name, count, error, problem))
    return found


def judge(
    out: np.ndarray, again: np.ndarray, exact: np.ndarray, magnitudes: np.ndarray
) -> tuple[float, str | None]:
    """The largest error, divided by the sum of the terms' magnitudes, and a description of the fault or None.

    Args:
        out: [M, N], the outputs.
        again: The outputs of a second call, which must have the same bits.
        exact: The outputs in float64.
        magnitudes: The sums of the magnitudes of each output's terms.
    """
    error = float(np.max(np.abs(out.astype(np.float64) - exact) / magnitudes))
    if not error <= BOUND:  # NaN is no small error
        return error, f"error of {error:.1e} of the sum of the terms' magnitudes, above {BOUND:.1e}"
    return error, None if out.tobytes() == again.tobytes() else "a second call gives other bits"


def _as_multiplied(rows: Array, w: Array | Narrow) -> np.ndarray:
    """Rows in float64, quantised if products quantise them."""
    if not isinstance(w, Quantized) or w.row_group is None:
        return np.asarray(rows, np.float64)
    values, scales = (
        np.asarray(part, np.float64) for part in quantize_rows(rows, w.row_group, implementation="xla")
    )
    return values * np.repeat(scales.T, w.row_group, axis=1)[:, : values.shape[1]]


def _in_float64(rows: np.ndarray, w: Array | Narrow) -> tuple[np.ndarray, np.ndarray]:
    """[M, N] of both: the products, and the sums of their terms' magnitudes."""
    wide = np.asarray(jax.jit(lambda w: w.widened(jnp.dtype(jnp.float32)))(w) if isinstance(w, Narrow) else w)
    parts, sizes = [], []
    for start in range(0, wide.shape[1], _COLUMNS):
        columns = wide[:, start : start + _COLUMNS].astype(np.float64)
        parts.append(rows @ columns)
        sizes.append(np.abs(rows) @ np.abs(columns))
    return np.concatenate(parts, axis=1), np.concatenate(sizes, axis=1)
