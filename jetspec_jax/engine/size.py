"""How much an engine holds at a time, and the shapes of its programs."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jetspec_jax.arguments import check_integer
from jetspec_jax.engine.pages import pages_for

if TYPE_CHECKING:  # configs name rules of kernels, which are JAX's; the scheduler does without
    from jetspec_jax.config import ModelConfig

MAX_SLOTS = 8
#: Of an engine for many: slots that it has on a GPU, if there is memory for them.
MOST_SLOTS = 256
#: Likewise prompt tokens between two dispatches, which a GPU takes in while others hardly wait; and nodes of
#: all live slots together, beyond which trees no longer pay.
PREFILL_TOKENS, MOST_ROWS = 1024, 1024
#: Likewise prompt tokens on a CPU: one forward of them.
CPU_PREFILL_TOKENS = 128
# Prompts that one forward takes in, and rows of each: few shapes, as each is a program. A GPU computes 1,024
# rows in the time in which it reads the weights a few times; on a CPU every row is work.
_GPU_CHUNKS, _CPU_CHUNKS = ((1, 128), (1, 1024), (8, 128)), ((1, 128),)
# Tokens that a slot can hold unless a request needs more: most requests then share their programs.
DEFAULT_CAPACITY = 1024


@dataclass(frozen=True)
class EngineSize:
    """How much an engine holds, and the shapes that its programs are compiled for.

    Attributes:
        slots: Requests that decode at the same time.
        capacity: Tokens of a slot, prompt and output together.
        num_pages: Pages of all slots together.
        chunks: Shapes of the forwards of prompts: how many prompts, and how many rows of each.
        live: Numbers of slots, in rising order, for which rounds are compiled beside all of them: a dispatch
            takes the smallest that holds those that decode.
        prefill_tokens: Prompt tokens that are committed between two dispatches, at most; None is no bound.
        most_rows: Nodes of all live slots together beyond which there are no larger trees to choose; None is
            no bound.
        pages_alone: Whether all that the target keeps of a slot's tokens lies on pages: then requests that
            begin alike share them. Else they do where there are snapshots.
        snapshots: Places for what slots keep beside pages: see `jetspec_jax.engine.snapshots.Snapshots`.
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
        chunks: tuple[tuple[int, int], ...] | None = None,
    ) -> "EngineSize":
        """A size, checked; None is the usual capacity, pages for every slot to be full, or a CPU's chunks.

        Raises:
            TypeError: It is no integer.
            ValueError: It is out of its range.
        """
        limit = target.max_position_embeddings
        capacity = default_capacity(target, 0) if capacity is None else capacity
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, not {slots}")
        check_integer("capacity", capacity, 1, limit)
        num_pages = slots * pages_for(capacity) if num_pages is None else num_pages
        chunks = _CPU_CHUNKS if chunks is None else chunks
        return cls(slots, capacity, num_pages, chunks, pages_alone=not target.layers_with_places)

    @property
    def shares_pages(self) -> bool:
        """Whether requests that begin alike share pages."""
        return self.pages_alone or self.snapshots > 0

    def with_snapshots(self, count: int | None = None) -> "EngineSize":
        """The same with so many snapshots, or as many as slots, where the target needs any.

        Raises:
            TypeError: ``count`` is no integer.
            ValueError: It is less than 0.
        """
        count = self.slots if count is None else check_integer("snapshots", count, 0)
        return replace(self, snapshots=0 if self.pages_alone else count)

    @property
    def pages_per_slot(self) -> int:
        """Pages that a slot can name."""
        return pages_for(self.capacity)

    @property
    def chunk_rows(self) -> int:
        """Rows of the largest forward of prompts."""
        return max(prompts * rows for prompts, rows in self.chunks)

    def nodes(self, bucket: int) -> int:
        """Most nodes of a round of all live slots together, where the largest trees have a bucket's."""
        if self.most_rows is None:
            return self.slots * bucket
        return max(self.slots, min(self.slots * bucket, self.most_rows))

    def live_for(self, count: int) -> int:
        """Slots of a dispatch in which ``count`` decode."""
        return next((own for own in self.live if own >= count), self.slots)

    def rounds(self, buckets: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """Shapes of rounds, live slots and nodes, for buckets in rising order; the first has them all."""
        most = math.inf if self.most_rows is None else self.most_rows
        return tuple(
            (live, bucket)
            for live in sorted({*self.live, self.slots})
            for bucket in buckets
            if bucket == buckets[0] or live * bucket <= most
        )


def powers(slots: int, base: int = 2) -> tuple[int, ...]:
    """Numbers of live slots for an engine of many: 1, 2, 4, … below all of them, or of another base."""
    return tuple(itertools.takewhile(lambda own: own < slots, (base**power for power in range(slots))))


def default_capacity(config: "ModelConfig", need: int) -> int:
    """Tokens per slot: the usual capacity, or the next power of two that holds ``need``."""
    usual = max(DEFAULT_CAPACITY, 1 << (need - 1).bit_length() if need else 0)
    return min(usual, config.max_position_embeddings)


def chunks_for(slots: int, *, gpu: bool) -> tuple[tuple[int, int], ...]:
    """The usual shapes of forwards of prompts for so many slots, with or without GPU kernels."""
    return tuple(shape for shape in (_GPU_CHUNKS if gpu else _CPU_CHUNKS) if shape[0] <= slots)


def slots_for(count: int, max_slots: int) -> int:
    """Slots for ``count`` prompts: a power of two, so that few programs serve all batch sizes.

    Raises:
        TypeError: ``max_slots`` is no integer.
        ValueError: ``max_slots`` is less than 1.
    """
    check_integer("max_slots", max_slots, 1)
    return min(1 << max(count - 1, 0).bit_length(), max_slots)
