"""The least time for some work, from the device's measured bandwidth and matmul rate.

Both rates are measured on the benchmark's device, because real programs do not reach a data sheet's figures.
The work repeats inside one program on the device, which excludes the host's part of a call. Its data are
random: zeros draw less power, and the device clocks higher.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from bench.common.timing import compile_seconds, median, on_gpu, seconds_of


class Work(NamedTuple):
    """Bytes moved to or from memory, and floating-point operations."""

    bytes: int = 0
    operations: int = 0


class Ceilings(NamedTuple):
    """Measured rates of one device.

    Attributes:
        reduction: Bytes per second of a sum over a large array.
        copy: Bytes per second, read and written, of scaling a large array.
        matmul: Operations per second of a product of two large square matrices.
    """

    reduction: float
    copy: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second, the higher of both measurements."""
        return max(self.reduction, self.copy)

    def seconds(self, work: Work) -> float:
        """The least seconds to move the bytes and to compute, whichever is longer."""
        return max(work.bytes / self.bandwidth, work.operations / self.matmul)

    def entry(self) -> dict[str, float]:
        """The rates as a report keeps them."""
        return {**self._asdict(), "bandwidth": self.bandwidth}


def measure_ceilings(dtype: jnp.dtype, repeats: int) -> Ceilings:
    """Measures the first device, with the matmul in ``dtype``; medians of ``repeats`` runs.

    On a GPU the arrays are much larger than its caches. On a CPU they are small, and the rates are rough.
    """
    elements, size, turns = (1 << 30, 8192, 16) if on_gpu() else (1 << 24, 512, 4)
    time = functools.partial(_seconds_of_a_turn, turns=turns, repeats=repeats)
    values = jax.jit(lambda: jax.random.uniform(jax.random.key(0), (elements,), jnp.float32))()
    num_bytes = values.size * values.dtype.itemsize
    reduction = time(_sum, values, jnp.float32(-1))
    copy = time(jnp.multiply, jnp.float32(0.999), values)
    del values
    # Scaled so that its powers neither overflow nor vanish.
    matrix = jax.random.normal(jax.random.key(1), (size, size), dtype) / jnp.asarray(size**0.5, dtype)
    matmul = time(_multiply, matrix, jnp.copy(matrix))
    return Ceilings(num_bytes / reduction, 2 * num_bytes / copy, 2 * size**3 / matmul)


def _seconds_of_a_turn(
    turn: Callable[[Array, Array], Array], fixed: Array, carried: Array, *, turns: int, repeats: int
) -> float:
    """Median seconds of one turn of a loop on the device; ``carried`` is donated."""

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(fixed: Array, carried: Array, turns: Int[Array, ""]) -> Array:
        return jax.lax.fori_loop(0, turns, lambda _, last: turn(fixed, last), carried)

    _, program = compile_seconds(loop, fixed, carried, np.int32(turns))
    seconds = []
    for _ in range(1 + repeats):
        elapsed, carried = seconds_of(program, fixed, carried, np.int32(turns))
        seconds.append(elapsed)
    return median(seconds[1:]) / turns


def _sum(values: Array, last: Array) -> Array:
    """A sum that depends on the last turn's. That sum is negative, so the maximum leaves the values alone."""
    return jnp.minimum(-jnp.sum(jnp.maximum(values, last)), jnp.float32(-1))


def _multiply(matrix: Array, last: Array) -> Array:
    # As in the models, float32 means full float32 precision.
    precision = jax.lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None
    return jnp.matmul(last, matrix, precision=precision)
