"""How a file lays out a parameter's axes: their order, and which of them it merges.

A torch ``Linear`` of grouped queries, keys and values, say, is a matrix ``[out, in]`` in the file::

    "m g r e -> (g r e) m"      parameter [M, G, R, E]  ->  tensor [G*R*E, M]
"""

import functools
import math
import re
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import numpy as np

AXES = re.compile(r"[\w ]*")
GROUPS = re.compile(r"( *(\w+|\([\w ]*\)) *)*")

# Rows of a tile: in bfloat16 a cache line of 64 bytes.
TILE = 32


class Layout(NamedTuple):
    """A permutation of axes and how they are merged.

    Attributes:
        order: The parameter's axes in the order of the file.
        merged: For each axis of the file, how many of these it consists of; 0 is an axis of one element.
    """

    order: tuple[int, ...]
    merged: tuple[int, ...]

    def view(self, parameter: np.ndarray) -> np.ndarray:
        """The parameter's axes in the order of the file, none merged; nothing is copied."""
        return parameter.transpose(self.order)

    def shape(self, view: np.ndarray) -> tuple[int, ...]:
        """The file's shape of such a view."""
        sizes = iter(view.shape)
        return tuple(math.prod(next(sizes) for _ in range(count)) for count in self.merged)

    def tiles(self, view: np.ndarray) -> Iterator[tuple[slice, ...]]:
        """Indices of parts of a view, of two axes or more, that are written one by one.

        A few rows of the parameter's last axis at a time, so that a transposition's cache lines are still
        there when the neighbours of an element are written.
        """
        axis = self.order.index(view.ndim - 1)
        if 0 < axis < view.ndim - 1:
            for i, start in product(range(len(view)), range(0, view.shape[axis], TILE)):
                yield (slice(i, i + 1), *[slice(None)] * (axis - 1), slice(start, start + TILE))
        else:
            yield from ((slice(start, start + TILE),) for start in range(0, len(view), TILE))


@functools.cache
def parse_layout(text: str) -> Layout:
    """Parses ``"axes of the parameter -> axes of the file"``.

    Both sides name the same axes. In the file's, names in parentheses are one axis, the last name runs
    fastest, and ``()`` is an axis of one element.

    Raises:
        ValueError: It is no such text.
    """
    left, arrow, right = text.partition("->")
    if not arrow or not AXES.fullmatch(left) or not GROUPS.fullmatch(right):
        raise ValueError(f"layout {text!r} is not of the form 'm h e -> (h e) m'")
    axes = left.split()
    groups = [(inside or name).split() for name, inside in re.findall(r"(\w+)|\(([\w ]*)\)", right)]
    stored = [name for group in groups for name in group]
    if len(set(axes)) < len(axes) or sorted(stored) != sorted(axes):
        raise ValueError(f"layout {text!r} does not name each axis once on either side")
    return Layout(tuple(map(axes.index, stored)), tuple(map(len, groups)))
