"""Mixes several sources of documents by weight, and removes repetitions."""

import hashlib
import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np

from train.data.holdout import evenly_spaced
from train.data.records import Document, learn_spans

#: What counts as a repetition: nothing, an equal answer after an equal history, or an equal history.
NONE, EXACT, BY_PROMPT = DEDUPLICATIONS = ("none", "exact", "prompt")

T = TypeVar("T")


def mix(sources: Sequence[Sequence[T]], weights: Sequence[float] | None) -> list[T]:
    """The largest mix of the sources by weight without repeated entries.

    The chosen entries are spread evenly over their source. Sources of 6 and 4 entries, mixed 1 to 1::

        a b c d e f    g h i j
        x . x x . x    x x x x

    Args:
        sources: The entries of each source.
        weights: A positive weight for each source; None returns all entries.

    Raises:
        ValueError: There are not as many weights as sources, one is not positive, or a source would be left
            without any entry.
    """
    return [
        source[index]
        for source, count in zip(sources, mix_counts([*map(len, sources)], weights), strict=True)
        for index in evenly_spaced(len(source), count)
    ]


def mix_counts(sizes: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """The entries of each source in `mix`, which raises the same errors."""
    if weights is None:
        return list(sizes)
    if len(weights) != len(sizes):
        raise ValueError(f"{len(weights)} weights for {len(sizes)} sources; give one for each")
    if wrong := [weight for weight in weights if not (math.isfinite(weight) and weight > 0)]:
        raise ValueError(f"a weight must be a positive number, not {wrong[0]}")
    scale = min(size / weight for size, weight in zip(sizes, weights, strict=True))
    # The division may miss a whole number by its rounding.
    counts = [math.floor(weight * scale * (1 + 1e-9)) for weight in weights]
    if 0 in counts:
        raise ValueError(
            f"source {counts.index(0) + 1} would have no entry in the mix: its weight is too small for "
            f"sources of {', '.join(map(str, sizes))} entries"
        )
    return counts


def distinct_turns(documents: Sequence[Document], by: str) -> list[Document | None]:
    """The documents with every turn learnt only once; None for a document with no turn left.

    A turn is a run of tokens to learn; its history is all tokens before it. A log with every request of a
    conversation repeats its turns; the longest document keeps them.

    Args:
        by: One of `DEDUPLICATIONS`. All of a plain text is learnt, and its history is the text itself.
    """
    if by == NONE:
        return list(documents)
    seen: set[bytes] = set()
    kept: list[Document | None] = [None] * len(documents)
    for index in sorted(range(len(documents)), key=lambda index: -len(documents[index].tokens)):
        document = documents[index]
        learn = document.learn.copy()
        for start, stop in learn_spans(document.learn):
            end = start if by == BY_PROMPT and start > 1 else stop
            key = hashlib.sha256(np.ascontiguousarray(document.tokens[:end]).tobytes()).digest()
            if key in seen:
                learn[start:stop] = False
            seen.add(key)
        if learn.any():
            kept[index] = Document(document.tokens, learn)
    return kept
