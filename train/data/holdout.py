"""Chooses the held-out documents: a head is evaluated on them and never learns from them."""

from collections.abc import Hashable, Sequence

import numpy as np

MOST_HELDOUT = 64


def default_heldout(count: int) -> int:
    """The default number of held-out documents: an eighth, at least 1 of 2, at most 64."""
    return min(MOST_HELDOUT, max(count // 8, 1)) if count >= 2 else 0


def hold_out(keys: Sequence[Hashable], heldout: int) -> list[int]:
    """Chooses evenly spaced documents, and all other documents with their keys.

    If keys repeat, the result may have fewer than ``heldout`` documents; if every key has more documents than
    that, it is all documents of one key. Choosing 2 of 6::

        a b c d e f    a b a b c d
        . h . . h .    h . h . . .

    Args:
        keys: A key per document; documents with equal keys go to the same split.
        heldout: The approximate number of documents to choose.

    Raises:
        ValueError: There are too few documents, or all keys are equal.
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
    # The group of each place, with the documents in the order of their groups.
    owners = np.repeat(np.arange(len(sizes)), sizes)
    for number, place in enumerate(evenly_spaced(count, heldout)):
        if held > number:
            continue  # an earlier group counted for several documents
        here = int(owners[place])
        if not free[here] or sizes[here] > heldout - held:
            fitting = np.flatnonzero(free & (sizes <= heldout - held))
            if len(fitting):  # the next group that fits, cyclically
                here = int(fitting[np.searchsorted(fitting, here) % len(fitting)])
            elif held:
                break
            else:
                here = int(np.argmin(sizes))
        free[here] = False
        held += int(sizes[here])
    return np.flatnonzero(~free[group]).tolist()


def evenly_spaced(count: int, most: int) -> list[int]:
    """At most ``most`` evenly spaced indices below ``count``: 1 and 4 for 2 of 6."""
    chosen = min(count, most)
    return ((2 * np.arange(chosen) + 1) * count // (2 * max(chosen, 1))).tolist()


def check_heldout(count: int, heldout: int) -> None:
    """Raises ValueError unless ``heldout`` documents can be held out and at least one remains."""
    if not 0 <= heldout < max(count, 1):
        raise ValueError(f"{heldout} of {count} documents cannot be held out: 0..{max(count, 1) - 1} can")
