"""Which documents are held out: those that a head is measured on, and that it never learns from."""

from collections.abc import Hashable, Sequence

import numpy as np

MOST_HELDOUT = 64


def default_heldout(count: int) -> int:
    """Documents held out unless somebody says otherwise: an eighth, at least 1 of 2, at most 64."""
    return min(MOST_HELDOUT, max(count // 8, 1)) if count >= 2 else 0


def hold_out(keys: Sequence[Hashable], heldout: int) -> list[int]:
    """Which documents are held out: evenly spaced ones, and with one of them all that have its key.

    Where keys recur, a few less than ``heldout`` may be chosen, or all of one key if each has more. For 6
    documents, of which 2 are to be held out::

        a b c d e f    a b a b c d
        . h . . h .    h . h . . .

    Args:
        keys: Each document's; equal ones must not stand on both sides.
        heldout: About how many.

    Raises:
        ValueError: There are not so many, or all keys are equal.
    """
    count = len(keys)
    check_heldout(count, heldout)
    if not heldout:
        return []
    numbers: dict[Hashable, int] = {}
    group = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
    if len(numbers) == 1:
        raise ValueError(
            f"all {count} prompts or texts are equal, so what is held out would be trained on too; bring at "
            "least 2 different ones, or hold out 0"
        )
    sizes = np.bincount(group)
    free, held = np.ones(len(sizes), bool), 0
    # Places among the documents in the order of their groups: a group is met as often as it has documents.
    owners = np.repeat(np.arange(len(sizes)), sizes)
    for number, place in enumerate(evenly_spaced(count, heldout)):
        if held > number:
            continue  # a group took the place of several documents
        here = int(owners[place])
        if not free[here] or sizes[here] > heldout - held:
            fitting = np.flatnonzero(free & (sizes <= heldout - held))
            if len(fitting):  # the next one, and after the last the first
                here = int(fitting[np.searchsorted(fitting, here) % len(fitting)])
            elif held:
                break
            else:
                here = int(np.argmin(sizes))
        free[here] = False
        held += int(sizes[here])
    return np.flatnonzero(~free[group]).tolist()


def evenly_spaced(count: int, heldout: int) -> list[int]:
    """Indices of so many of ``count`` documents: 1 and 4 for 2 of 6."""
    return ((2 * np.arange(heldout) + 1) * count // (2 * max(heldout, 1))).tolist()


def check_heldout(count: int, heldout: int) -> None:
    """Raises ValueError unless so many can be held out with at least one left."""
    if not 0 <= heldout < max(count, 1):
        raise ValueError(f"{heldout} of {count} documents cannot be held out: 0..{max(count, 1) - 1} can")
