"""Sizes of engines: slots, pages, and the shapes of programs."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jetspec_jax.arguments import check_integer
from jetspec_jax.engine.pages import pages_for

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


@dataclass(frozen=True)
class EngineSize:
    """Slots, pages and program shapes of an engine.

    Attributes:
        slots: Requests that decode at the same time.
        capacity: Tokens of a slot, prompt and output together.
        num_pages: Pages of all slots together.
        chunks: Shapes of prefill forwards: number of prompts, and rows of each.
        live: Numbers of live slots, in rising order, that rounds are compiled for, besides all slots: a
            dispatch uses the smallest sufficient number.
        prefill_tokens: Most prompt tokens between two dispatches; None is no limit.
        most_rows: Most nodes of all live slots together, for trees that "auto" chooses; None is no limit.
        pages_alone: Whether pages hold all that the target stores of a slot's tokens. Then requests share
            prefixes without snapshots.
        snapshots: Number of snapshots of slots: see `jetspec_jax.engine.snapshots.Snapshots`.
    """

    slots: int
    capacity: int
    num_pages: int
    chunks: tuple[tuple[int, int], ...] = _CPU_CHUNKS
    live: tuple[int, ...] = ()
    prefill_tokens: int | None = None
    most_rows: int | None = None
    pages_alone: bool = True
    snapshots: int = 0

    @classmethod
    def of(
        cls,
        target: "ModelConfig",
        slots: int,
        capacity: int | None,
        num_pages: int | None = None,
        chunks: tuple[tuple[int, int], ...] = _CPU_CHUNKS,
    ) -> "EngineSize":
        """A checked size; None is the default capacity, or pages for every slot to be full.

        Raises:
            TypeError: A value is not an integer.
            ValueError: A value is out of its range.
        """
        limit = target.max_position_embeddings
        capacity = default_capacity(target, 0) if capacity is None else capacity
        check_integer("max_slots", slots, 1)
        check_integer("capacity", capacity, 1, limit)
        num_pages = slots * pages_for(capacity) if num_pages is None else num_pages
        return cls(slots, capacity, num_pages, chunks, pages_alone=not target.layers_with_places)

    @property
    def shares_pages(self) -> bool:
        """Whether requests share pages of common prefixes."""
        return self.pages_alone or self.snapshots > 0

    def with_snapshots(self, count: int | None = None) -> "EngineSize":
        """The same size with ``count`` snapshots, by default one per slot, if the target needs any.

        Raises:
            TypeError: ``count`` is not an integer.
            ValueError: It is less than 0.
        """
        count = self.slots if count is None else check_integer("snapshots", count, 0)
        return replace(self, snapshots=0 if self.pages_alone else count)

    @property
    def pages_per_slot(self) -> int:
        """Pages in a slot's block table."""
        return pages_for(self.capacity)

    @property
    def chunk_rows(self) -> int:
        """Rows of the largest prefill forward."""
        return max(prompts * rows for prompts, rows in self.chunks)

    def with_slots(self, slots: int) -> "EngineSize":
        """The same size with fewer slots, and their share of the pages and snapshots."""
        pages, snapshots = (count * slots // self.slots for count in (self.num_pages, self.snapshots))
        chunks = tuple(shape for shape in self.chunks if shape[0] <= slots)
        live = tuple(count for count in self.live if count < slots)
        pages = max(pages, self.pages_per_slot)
        return replace(self, slots=slots, num_pages=pages, snapshots=snapshots, chunks=chunks, live=live)

    def holding(self, count: int, capacity: int) -> "EngineSize":
        """The same size with another capacity, and pages for ``count`` requests of it."""
        pages = max(self.num_pages, min(count, self.slots) * pages_for(capacity))
        return replace(self, capacity=capacity, num_pages=pages)

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

    def rounds(self, buckets: Sequence[int]) -> tuple[tuple[int, int], ...]:
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


def chunks_for(slots: int, *, gpu: bool) -> tuple[tuple[int, int], ...]:
    """Default shapes of prefill forwards for ``slots`` slots, with or without GPU kernels."""
    return tuple(shape for shape in (_GPU_CHUNKS if gpu else _CPU_CHUNKS) if shape[0] <= slots)
