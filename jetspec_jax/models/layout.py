"""The layout of a parameter's axes in a file: their order, and which are merged.

Example: a torch ``Linear`` of grouped queries, keys and values is a matrix ``[out, in]`` in the file::

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

# Rows of a tile: 32 bfloat16 values are a cache line of 64 bytes.
TILE = 32


class Layout(NamedTuple):
    """A permutation and merging of axes.

    Attributes:
        order: The parameter's axes in the file's order.
        merged: The number of parameter axes in each axis of the file; 0 is an axis of one element.
    """

    order: tuple[int, ...]
    merged: tuple[int, ...]

    def shape(self, view: np.ndarray) -> tuple[int, ...]:
        """The file's shape for a view with the parameter's axes in the file's order."""
        sizes = iter(view.shape)
        return tuple(math.prod(next(sizes) for _ in range(count)) for count in self.merged)

    def tiles(self, view: np.ndarray) -> Iterator[tuple[slice, ...]]:
        """Indices of the tiles of a view of two axes or more, in the order in which to copy them.

        A tile has few rows along the parameter's last axis, so that a transposition finds its cache lines
        still cached when it writes the neighbours of an element.
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

    Both sides have the same names. On the file's side, names in parentheses are merged into one axis with the
    last name varying fastest, and ``()`` is an axis of one element.
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
