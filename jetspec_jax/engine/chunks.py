"""Cuts prompts into chunks: which parts of which prompts each prefill forward contains.

Shapes: P prompts of a forward, C tokens of a chunk, S remaining tokens of a prompt.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from jetspec_jax.engine.records import Chunk

# Fixed cost of a forward, in rows: it reads all weights, however few its rows.
_FORWARD = 192

#: Tokens that remain to be prefilled, by slot, in the order of service; no entry is empty.
Remaining = Mapping[int, Int32[np.ndarray, "S"]]
#: Offsets into the remaining tokens of slots at which a forward must end, in rising order, all above 0.
Cuts = Mapping[int, Sequence[int]]


def cut_prompts(
    remaining: Remaining,
    shapes: Sequence[tuple[int, int]],
    num_slots: int,
    most: int | None = None,
    cuts: Cuts | None = None,
) -> list[Chunk]:
    """Chunks for all remaining tokens, or for ``most`` of them.

    Args:
        remaining: Remaining tokens by slot.
        shapes: Shapes to choose from: prompts, at most the number of slots, and rows of each.
        num_slots: Number of slots; idle slots that pad a forward must be distinct.
        most: Most tokens; None is no limit.
        cuts: Offsets at which forwards must end, by slot, besides the prompts' ends; None is nowhere.
    """
    chunks, cuts, room = [], cuts or {}, sum(map(len, remaining.values()))
    room = room if most is None else min(most, room)
    while room > 0:
        chunks.append(chunk := _next_chunk(remaining, shapes, num_slots, room, cuts))
        taken = dict(zip(chunk.slots.tolist(), chunk.counts.tolist(), strict=True))
        room -= sum(taken.values())
        rests = {slot: tokens[taken.get(slot, 0) :] for slot, tokens in remaining.items()}
        remaining = {slot: rest for slot, rest in rests.items() if len(rest)}
        moved = {slot: [cut - taken.get(slot, 0) for cut in offsets] for slot, offsets in cuts.items()}
        cuts = {slot: [cut for cut in offsets if cut > 0] for slot, offsets in moved.items()}
    return chunks


def _next_chunk(
    remaining: Remaining, shapes: Sequence[tuple[int, int]], num_slots: int, most: int, cuts: Cuts
) -> Chunk:
    """The next chunk, in the shape with the most tokens per cost of its forward."""
    ends = {slot: offsets[0] for slot, offsets in cuts.items() if offsets}

    def parts(shape: tuple[int, int]) -> dict[int, int]:
        """Tokens of each slot in a forward of a shape."""
        (prompts, rows), room, counts_by_slot = shape, most, {}
        for slot, tokens in remaining.items():
            if len(counts_by_slot) == prompts or not room:
                break
            counts_by_slot[slot] = min(ends.get(slot, len(tokens)), len(tokens), rows, room)
            room -= counts_by_slot[slot]
        return counts_by_slot

    def worth(shape: tuple[int, int]) -> float:
        prompts, rows = shape
        return sum(parts(shape).values()) / (prompts * rows + _FORWARD)

    prompts, rows = shape = max(shapes, key=worth)
    counts_by_slot = parts(shape)
    idle = [slot for slot in range(num_slots) if slot not in counts_by_slot]
    slots = [*counts_by_slot, *idle[: prompts - len(counts_by_slot)]]
    tokens = np.zeros((prompts, rows), np.int32)
    counts, ready = np.zeros(prompts, np.int32), np.zeros(prompts, bool)
    for row, (slot, count) in enumerate(counts_by_slot.items()):
        tokens[row, :count] = remaining[slot][:count]
        counts[row], ready[row] = count, count == len(remaining[slot])
    return Chunk(np.array(slots, np.int32), tokens, counts, ready)
