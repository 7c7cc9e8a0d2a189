"""Packs documents into windows.

The plan depends only on lengths, window and seed, so all processes and resumed runs make the same plan.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Packed(NamedTuple):
    """Pieces of documents in windows.

    Attributes:
        pieces: Indices of all pieces, window after window.
        first: Where each window begins in ``pieces``, then the length of ``pieces``.
    """

    pieces: Int[np.ndarray, "n"]
    first: Int[np.ndarray, "w+1"]


def pack(lengths: Int[np.ndarray, "n"], window: int, seed: int) -> Packed:
    """Packs pieces into windows with little padding.

    Best fit decreasing: pieces are placed from the longest, each in the window with the least room that fits.
    Pieces of lengths 3, 2, 6, 5, 4 in windows of 8; the third has 4 tokens of padding::

        2 2 2 2 2 2 1 1 | 3 3 3 3 3 0 0 0 | 4 4 4 4 . . . .

    Args:
        lengths: Tokens of each piece, 1..``window``.
        window: Tokens of a window.
        seed: Decides among pieces of equal length.
    """
    # The raw output of a bit generator is the same in all versions of NumPy.
    order = np.lexsort((np.random.Philox(key=seed).random_raw(len(lengths)), -lengths))
    owner = np.zeros(len(lengths), np.int64)
    # Windows by their free tokens; bit r of ``rooms`` is set if some window has r free.
    open_windows: list[list[int]] = [[] for _ in range(window)]
    rooms, count = 0, 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            number = open_windows[room].pop()
            if not open_windows[room]:
                rooms ^= 1 << room
        else:
            room, number, count = window, count, count + 1
        owner[piece] = number
        if left := room - length:
            open_windows[left].append(number)
            rooms |= 1 << left
    pieces = order[np.argsort(owner[order], kind="stable")]
    return Packed(pieces, np.searchsorted(owner[pieces], np.arange(count + 1)))
