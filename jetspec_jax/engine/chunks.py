"""How prompts are cut: which parts of which prompts the next forwards take in.

Shapes: P prompts of a forward, C tokens of a chunk, S tokens that are left of a prompt.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from jetspec_jax.engine.records import Chunk

# What a forward costs beside its rows, in rows: it reads all weights however few they are.
_FORWARD = 192

#: What is left to prefill of each slot's prompt, first come first; nobody has nothing left.
Left = Mapping[int, Int32[np.ndarray, "S"]]
#: Places in what is left of slots' prompts, in rising order and none at its beginning: a forward ends there.
Cuts = Mapping[int, Sequence[int]]


def cut_prompts(
    left: Left,
    shapes: Sequence[tuple[int, int]],
    num_slots: int,
    most: int | None = None,
    cuts: Cuts | None = None,
) -> list[Chunk]:
    """Chunks until nothing is left, or until so many tokens are taken; at least one if anything is left.

    Args:
        left: What is left.
        shapes: Those to choose from: prompts, none more than there are slots, and rows of each.
        num_slots: How many slots there are: those that fill a forward up must be distinct too.
        most: Tokens that are taken; None is all.
        cuts: Where forwards must end, by slot, beside the ends; None is nowhere.
    """
    chunks, cuts = [], cuts or {}
    while left and (most is None or most > 0):
        chunks.append(chunk := next_chunk(left, shapes, num_slots, most, cuts))
        taken = dict(zip(chunk.slots.tolist(), chunk.counts.tolist(), strict=True))
        most = None if most is None else most - sum(taken.values())
        rests = {slot: tokens[taken.get(slot, 0) :] for slot, tokens in left.items()}
        left = {slot: rest for slot, rest in rests.items() if len(rest)}
        moved = {slot: [cut - taken.get(slot, 0) for cut in own] for slot, own in cuts.items()}
        cuts = {slot: [cut for cut in own if cut > 0] for slot, own in moved.items()}
    return chunks


def next_chunk(
    left: Left,
    shapes: Sequence[tuple[int, int]],
    num_slots: int,
    most: int | None = None,
    cuts: Cuts | None = None,
) -> Chunk:
    """The next parts of prompts, in the shape that takes the most tokens for what its forward costs.

    The arguments are those of `cut_prompts`.
    """
    total = sum(map(len, left.values())) if most is None else most
    ends = {slot: own[0] for slot, own in (cuts or {}).items() if own}

    def parts(shape: tuple[int, int]) -> dict[int, int]:
        """Tokens that are taken of each slot."""
        (prompts, rows), room, own = shape, total, {}
        for slot, tokens in left.items():
            if len(own) == prompts or not room:
                break
            own[slot] = min(ends.get(slot, len(tokens)), len(tokens), rows, room)
            room -= own[slot]
        return own

    def worth(shape: tuple[int, int]) -> float:
        prompts, rows = shape
        return sum(parts(shape).values()) / (prompts * rows + _FORWARD)

    prompts, rows = shape = max(shapes, key=worth)
    own = parts(shape)
    idle = [slot for slot in range(num_slots) if slot not in own]
    slots = [*own, *idle[: prompts - len(own)]]
    tokens = np.zeros((prompts, rows), np.int32)
    counts, ready = np.zeros(prompts, np.int32), np.zeros(prompts, bool)
    for row, (slot, count) in enumerate(own.items()):
        tokens[row, :count] = left[slot][:count]
        counts[row], ready[row] = count, count == len(left[slot])
    return Chunk(np.array(slots, np.int32), tokens, counts, ready)
