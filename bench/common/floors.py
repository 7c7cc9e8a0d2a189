"""What work costs at least: what the device itself reaches, in bytes and in operations of a matmul a second.

Both are measured where the benchmark runs, because nobody reaches a data sheet's figures. The work repeats
on the device inside one program, so that the host's part of a call does not count, and on random data,
because zeros draw less power and clock higher.
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
    """Bytes moved to or from memory, and multiplications and additions."""

    bytes: int = 0
    operations: int = 0


class Ceilings(NamedTuple):
    """What one device reaches.

    Attributes:
        reduction: Bytes a second of a sum over a large array.
        copy: Bytes a second, read and written, of a large array that is scaled.
        matmul: Operations a second of a product of two large square matrices.
    """

    reduction: float
    copy: float
    matmul: float

    @property
    def bandwidth(self) -> float:
        """Bytes a second, the best that was seen."""
        return max(self.reduction, self.copy)

    def seconds(self, work: Work) -> float:
        """Least seconds of some work: to move its bytes or to compute it, whichever takes longer."""
        return max(work.bytes / self.bandwidth, work.operations / self.matmul)

    def entry(self) -> dict[str, float]:
        """What a report says of them."""
        return {**self._asdict(), "bandwidth": self.bandwidth}


def measure_ceilings(dtype: jnp.dtype, repeats: int) -> Ceilings:
    """Measures this device, with the matmul in ``dtype``; medians over ``repeats`` runs.

    On a GPU the arrays are far beyond its caches; elsewhere they are small, and the figures rough.
    """
    elements, size, turns = (1 << 30, 8192, 16) if on_gpu() else (1 << 24, 512, 4)
    time = functools.partial(_seconds_of_a_turn, turns=turns, repeats=repeats)
    values = jax.jit(lambda: jax.random.uniform(jax.random.key(0), (elements,), jnp.float32))()
    num_bytes = values.size * values.dtype.itemsize
    reduction = time(_sum, values, jnp.float32(-1))
    copy = time(_scale, jnp.float32(0.999), values)
    del values
    # Powers of a matrix that neither grow nor vanish much.
    matrix = jax.random.normal(jax.random.key(1), (size, size), dtype) / jnp.asarray(size**0.5, dtype)
    matmul = time(_multiply, matrix, jnp.copy(matrix))
    return Ceilings(num_bytes / reduction, 2 * num_bytes / copy, 2 * size**3 / matmul)


def _seconds_of_a_turn(
    turn: Callable[[Array, Array], Array], fixed: Array, carried: Array, *, turns: int, repeats: int
) -> float:
    """Median seconds of one turn of a loop on the device; what it carries is donated from run to run."""

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(fixed: Array, carried: Array, turns: Int[Array, ""]) -> Array:
        return jax.lax.fori_loop(0, turns, lambda _, last: turn(fixed, last), carried)

    _, program = compile_seconds(loop, fixed, carried, np.int32(turns))
    seconds = []
    for _ in range(1 + repeats):
        taken, carried = seconds_of(program, fixed, carried, np.int32(turns))
        seconds.append(taken)
    return median(seconds[1:]) / turns


def _sum(values: Array, last: Array) -> Array:
    """A sum that needs the one before it, which as a lower bound of positive values changes nothing."""
    return jnp.minimum(-jnp.sum(jnp.maximum(values, last)), jnp.float32(-1))


def _scale(factor: Array, values: Array) -> Array:
    return factor * values


def _multiply(matrix: Array, last: Array) -> Array:
    # As in the models: float32 means all of float32.
    precision = jax.lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else None
    return jnp.matmul(last, matrix, precision=precision)
