"""Arrays that are made when they are needed, so that more of them can be named than memory holds."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class Unread:
    """Stands in the place of a NumPy array, which ``np.asarray`` makes of it, each time anew.

    Attributes:
        shape: Of the array.
        dtype: Of the array.
        read: Makes it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The array."""
        return self.read()
