"""Large arrays copied by several threads: NumPy lets go of Python while it copies.

In a parameter a file's tensor mostly lies transposed, and one thread transposes more slowly than files can be
read.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

from jetspec_jax.checkpoint.finite import is_finite

_CPUS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
#: Beyond this they wait for each other, and for the memory.
THREADS = min(8, _CPUS)
#: Arrays of fewer bytes are copied by the thread that asks.
SMALL = 2**20
# That a thread copies in a row: no fewer, as to hand them over takes a while, too.
_TILES = 32


class Copies:
    """Copies of one origin, that others may go on beside."""

    def __init__(self, threads: Executor | None):
        """Begins nothing yet; without threads each copy is made at once."""
        self._threads, self._begun = threads, list[Future[None]]()

    def begin(self, copy: Callable[[Any], None], tiles: Iterable[Any]) -> None:
        """Begins to call a function with each of some tiles."""
        tiles = list(tiles)
        if self._threads is None:
            _copy_all(copy, tiles)
            return
        for start in range(0, len(tiles), _TILES):
            self._begun.append(self._threads.submit(_copy_all, copy, tiles[start : start + _TILES]))

    def end(self) -> None:
        """Waits for what was begun, and raises what one of the copies has raised."""
        for copy in self._begun:
            copy.result()


def _copy_all(copy: Callable[[Any], None], tiles: Sequence[Any]) -> None:
    with np.errstate(over="ignore"):  # what overflows is not finite, and is named then
        for tile in tiles:
            copy(tile)


def all_finite(values: np.ndarray, threads: Executor | None) -> bool:
    """As `is_finite`, by several threads."""
    if threads is None:
        return is_finite(values)
    return all(threads.map(is_finite, np.array_split(values.reshape(-1), THREADS)))
