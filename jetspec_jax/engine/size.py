"""Sizes of engines: slots, pages, the shapes and the order of programs, and prompts cut into such shapes.

Shapes: P prompts of a forward, C tokens of a chunk, S remaining tokens of a prompt.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int32

from jetspec_jax.arguments import check_integer
from jetspec_jax.cache.pages import pages_for
from jetspec_jax.engine.batch import PREFILL, Chunk, Kind, Program, Shape

if TYPE_CHECKING:  # config imports kernels, and so JAX; the scheduler must not
    from jetspec_jax.config import ModelConfig

MAX_SLOTS = 8
#: Most slots of an `AsyncLLM` on a GPU, if there is memory for them.
MOST_SLOTS = 256
#: Likewise: prompt tokens between two dispatches, which delay running requests little; and nodes of all live
#: slots together, beyond which larger trees no longer pay.
PREFILL_TOKENS, MOST_ROWS = 1024, 1024
#: Prompt tokens between two dispatches on a CPU: one prefill forward.
CPU_PREFILL_TOKENS = 128
# Prompts and rows of a prefill forward: few shapes, as each is a program. A GPU computes 1,024 rows in the
# time in which it reads the weights a few times; on a CPU every row is work.
_GPU_CHUNKS, _CPU_CHUNKS = ((1, 128), (1, 1024), (8, 128)), ((1, 128),)
# Tokens per slot unless a request needs more: most requests then share their programs.
DEFAULT_CAPACITY = 1024
#: Fixed cost of a forward, in rows: it reads all weights, however few its rows.
FORWARD_ROWS = 192

#: Tokens that remain to be prefilled, by slot, in the order of service; no entry is empty.
Remaining = Mapping[int, Int32[np.ndarray, "S"]]
#: Offsets into the remaining tokens of slots at which a forward must end, in rising order, all above 0.
Cuts = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class EngineSize:
    """Slots, pages and program shapes of an engine."""

    slots: int  # requests that decode at the same time
    capacity: int  # tokens of a slot, prompt and output together
    num_pages: int  # of all slots together
    chunks: tuple[Shape, ...] = _CPU_CHUNKS  # shapes of prefill forwards
    # Numbers of live slots, in rising order, that rounds are compiled for, besides all slots: a dispatch uses
    # the smallest sufficient number.
    live: tuple[int, ...] = ()
    prefill_tokens: int | None = None  # most prompt tokens between two dispatches; None is no limit
    # Most nodes of all live slots together, for trees that "auto" chooses; None is no limit.
    most_rows: int | None = None
    # Whether pages hold all that the target stores of a slot's tokens: requests share prefixes without
    # snapshots then.
    pages_alone: bool = True
    snapshots: int = 0  # of slots: see `jetspec_jax.engine.pages.Snapshots`

    @classmethod
    def of(
        cls,
        target: "ModelConfig",
        slots: int,
        capacity: int | None,
        num_pages: int | None = None,
        chunks: tuple[Shape, ...] = _CPU_CHUNKS,
    ) -> "EngineSize":
        """A checked size; None is the default capacity, or pages for every slot to be full."""
        capacity = default_capacity(target, 0) if capacity is None else capacity
        check_integer("max_slots", slots, 1)
        check_integer("capacity", capacity, 1, target.max_position_embeddings)
        num_pages = slots * pages_for(capacity) if num_pages is None else num_pages
        return cls(slots, capacity, num_pages, chunks, pages_alone=not target.layers_with_places)

    @property
    def shares_pages(self) -> bool:
        """Whether requests share pages of common prefixes."""
        return self.pages_alone or self.snapshots > 0

    def with_snapshots(self, count: int | None = None) -> "EngineSize":
        """The same size with ``count`` snapshots, by default one per slot, if the target needs any."""
        count = self.slots if count is None else check_integer("snapshots", count, 0)
        return replace(self, snapshots=0 if self.pages_alone else count)

    @property
    def pages_per_slot(self) -> int:
        """Pages in a slot's block table."""
        return pages_for(self.capacity)

    def with_slots(self, slots: int) -> "EngineSize":
        """The same size with fewer slots, and their share of the pages and snapshots."""
        pages, snapshots = (count * slots // self.slots for count in (self.num_pages, self.snapshots))
        chunks = tuple(shape for shape in self.chunks if shape[0] <= slots)
        live = tuple(count for count in self.live if count < slots)
        pages = max(pages, self.pages_per_slot)
        return replace(self, slots=slots, num_pages=pages, snapshots=snapshots, chunks=chunks, live=live)

    def nodes(self, bucket: int) -> int:
        """Most nodes of a round of all live slots together, with trees of up to ``bucket`` nodes."""
        if self.most_rows is None:
            return self.slots * bucket
        return max(self.slots, min(self.slots * bucket, self.most_rows))

    def live_for(self, count: int) -> int:
        """Live slots of the program that runs ``count`` decoding slots."""
        return next((live for live in self.live if live >= count), self.slots)

    def allows(self, live: int, bucket: int) -> bool:
        """Whether rounds may have so many nodes; plain rounds always may."""
        return bucket == 1 or self.most_rows is None or live * bucket <= self.most_rows

    def rounds(self, buckets: Sequence[int]) -> tuple[Shape, ...]:
        """Shapes of rounds, live slots and nodes, for buckets in rising order."""
        lives = sorted({*self.live, self.slots})
        return tuple((live, bucket) for live in lives for bucket in buckets if self.allows(live, bucket))


def powers(slots: int, base: int = 2) -> tuple[int, ...]:
    """Numbers of live slots: powers of ``base`` below ``slots``."""
    return tuple(itertools.takewhile(lambda live: live < slots, (base**power for power in range(slots))))


def default_capacity(config: "ModelConfig", need: int) -> int:
    """Tokens per slot: the usual capacity, or the next power of two that holds ``need``."""
    usual = max(DEFAULT_CAPACITY, 1 << (need - 1).bit_length() if need else 0)
    return min(usual, config.max_position_embeddings)


def chunks_for(slots: int, *, gpu: bool) -> tuple[Shape, ...]:
    """Default shapes of prefill forwards for ``slots`` slots, with or without GPU kernels."""
    return tuple(shape for shape in (_GPU_CHUNKS if gpu else _CPU_CHUNKS) if shape[0] <= slots)


def first_programs(size: EngineSize, buckets: Sequence[int], kind: Kind) -> list[Program]:
    """Programs that can serve any request of a kind, and the trees' sizes ``buckets``, in rising order.

    They are the largest chunk, and rounds with all slots live: the largest trees that these allow, and plain.
    Of chunks with equally many rows it is the one with the fewest prompts: a long prompt fills it.
    """
    chunk = max(size.chunks, key=lambda shape: (shape[0] * shape[1], -shape[0]))
    largest = max(bucket for bucket in buckets if size.allows(size.slots, bucket))
    rounds = [Program(str(kind), size.slots, bucket) for bucket in sorted({buckets[0], largest})]
    return [Program(PREFILL, *chunk), *rounds]


def compile_order(size: EngineSize, buckets: Sequence[int], kinds: Sequence[Kind]) -> list[Program]:
    """Prefill forwards and rounds of some kinds, in the order of compiling.

    First come the programs that can serve any request, of every kind, then prefill forwards, then rounds by
    live slots, in rising order: most servers have few requests at a time, and where many run, the largest
    shape costs little more than the right one: the largest trees, plain rounds, then the other trees.
    """
    kinds = sorted(kinds)
    first = [program for kind in kinds for program in first_programs(size, buckets, kind)]
    chunks = [Program(PREFILL, *chunk) for chunk in size.chunks]
    most, rounds = dict(size.rounds(buckets)), size.rounds(buckets)
    shapes = sorted(rounds, key=lambda each: (each[0], each[1] < most[each[0]], each[1] > 1, -each[1]))
    rest = [Program(str(kind), *shape) for kind in kinds for shape in shapes]
    return list(dict.fromkeys([*first, *chunks, *rest]))


def cut_prompts(
    remaining: Remaining,
    shapes: Sequence[Shape],
    num_slots: int,
    most: int | None = None,
    cuts: Cuts | None = None,
) -> list[Chunk]:
    """Chunks for all remaining tokens, or for ``most`` of them, in some shapes of prefill forwards.

    Forwards end at the ``cuts``, besides the prompts' ends. Idle slots pad a forward, each once.
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
    remaining: Remaining, shapes: Sequence[Shape], num_slots: int, most: int, cuts: Cuts
) -> Chunk:
    """The next chunk, in the shape with the most tokens per cost of its forward."""
    ends = {slot: offsets[0] for slot, offsets in cuts.items() if offsets}

    def parts(shape: Shape) -> dict[int, int]:
        """Tokens of each slot in a forward of a shape."""
        (prompts, rows), room, counts_by_slot = shape, most, {}
        for slot, tokens in remaining.items():
            if len(counts_by_slot) == prompts or not room:
                break
            counts_by_slot[slot] = min(ends.get(slot, len(tokens)), len(tokens), rows, room)
            room -= counts_by_slot[slot]
        return counts_by_slot

    def worth(shape: Shape) -> float:
        prompts, rows = shape
        return sum(parts(shape).values()) / (prompts * rows + FORWARD_ROWS)

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
