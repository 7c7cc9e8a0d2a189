"""Copies large arrays with several threads; NumPy releases the GIL while it copies.

Most tensors are transposed when they are read, and one thread transposes more slowly than files are read.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from jetspec_jax.checkpoint.finite import is_finite

_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
#: More threads would wait for each other and for memory.
THREADS = min(8, _CPUS)
#: Arrays with fewer bytes are copied by the calling thread.
SMALL = 2**20
# Tiles per task; fewer would make the overhead of a task noticeable.
_TILES = 32


class Copies:
    """A group of copies that run in threads until `end`."""

    def __init__(self, threads: Executor | None):
        """Without threads, `begin` copies at once."""
        self._threads, self._begun = threads, list[Future[None]]()

    def begin(self, copy: Callable[[Any], None], tiles: Iterable[Any]) -> None:
        """Starts calling ``copy`` with each tile."""
        tiles = list(tiles)
        if self._threads is None:
            _copy_all(copy, tiles)
            return
        for start in range(0, len(tiles), _TILES):
            self._begun.append(self._threads.submit(_copy_all, copy, tiles[start : start + _TILES]))

    def end(self) -> None:
        """Waits for all copies, and raises the first error."""
        for copy in self._begun:
            copy.result()


def _copy_all(copy: Callable[[Any], None], tiles: Sequence[Any]) -> None:
    with np.errstate(over="ignore"):  # values that overflow are reported as not finite later
        for tile in tiles:
            copy(tile)


def all_finite(values: np.ndarray, threads: Executor | None) -> bool:
    """`is_finite` with several threads."""
    if threads is None:
        return is_finite(values)
    return all(threads.map(is_finite, np.array_split(values.reshape(-1), THREADS)))
