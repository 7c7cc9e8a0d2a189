"""How prompts are cut: which parts of which prompts the next forward takes in.

Shapes: P prompts of a forward, C tokens of a chunk.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from jetspec_jax.engine.records import Chunk

# What a forward costs beside its rows, in rows: it reads all weights however few they are.
_FORWARD = 192


def next_chunk(
    left: Mapping[int, Int32[np.ndarray, "_"]], shapes: Sequence[tuple[int, int]], num_slots: int
) -> Chunk:
    """The next parts of prompts, in the shape that takes the most tokens for what its forward costs.

    Args:
        left: What is left to prefill of each slot's prompt, first come first; nobody has nothing left.
        shapes: Those to choose from: prompts, none more than there are slots, and rows of each.
        num_slots: How many slots there are: those that fill a forward up must be distinct too.
    """

    def worth(shape: tuple[int, int]) -> float:
        prompts, rows = shape
        taken = sum(min(len(tokens), rows) for tokens in itertools.islice(left.values(), prompts))
        return taken / (prompts * rows + _FORWARD)

    prompts, rows = max(shapes, key=worth)
    own = dict(itertools.islice(left.items(), prompts))
    idle = (slot for slot in range(num_slots) if slot not in own)
    slots = [*own, *itertools.islice(idle, prompts - len(own))]
    tokens = np.zeros((prompts, rows), np.int32)
    counts, ready = np.zeros(prompts, np.int32), np.zeros(prompts, bool)
    for row, part in enumerate(own.values()):
        counts[row] = min(len(part), rows)
        tokens[row, : counts[row]] = part[:rows]
        ready[row] = len(part) <= rows
    return Chunk(np.array(slots, np.int32), tokens, counts, ready)


def whole_prompts(
    left: Mapping[int, Int32[np.ndarray, "_"]], shapes: Sequence[tuple[int, int]], num_slots: int
) -> list[Chunk]:
    """Chunks until nothing is left; see `next_chunk`."""
    chunks, left = [], {slot: tokens for slot, tokens in left.items() if len(tokens)}
    while left:
        chunks.append(chunk := next_chunk(left, shapes, num_slots))
        taken = dict(zip(chunk.slots.tolist(), chunk.counts.tolist(), strict=True))
        rests = {slot: tokens[taken.get(slot, 0) :] for slot, tokens in left.items()}
        left = {slot: rest for slot, rest in rests.items() if len(rest)}
    return chunks
