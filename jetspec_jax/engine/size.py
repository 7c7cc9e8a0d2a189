"""How much an engine holds at a time."""

from dataclasses import dataclass

from jetspec_jax.arguments import check_integer
from jetspec_jax.config import ModelConfig
from jetspec_jax.engine.pages import pages_for

MAX_SLOTS = 8
# Prompts that one forward takes in, and rows of each: few shapes, as each is a program. A GPU computes 1,024
# rows in the time in which it reads the weights a few times; on a CPU every row is work.
_GPU_CHUNKS, _CPU_CHUNKS = ((1, 128), (1, 1024), (8, 128)), ((1, 128),)
# Tokens that a slot can hold unless a request needs more: most requests then share their programs.
DEFAULT_CAPACITY = 1024


@dataclass(frozen=True)
class EngineSize:
    """How much an engine holds.

    Attributes:
        slots: Requests that decode at the same time.
        capacity: Tokens of a slot, prompt and output together.
        num_pages: Pages of all slots together.
        chunks: Shapes of the forwards of prompts: how many prompts, and how many rows of each.
    """

    slots: int
    capacity: int
    num_pages: int
    chunks: tuple[tuple[int, int], ...] = _CPU_CHUNKS

    @classmethod
    def of(
        cls,
        target: ModelConfig,
        slots: int,
        capacity: int | None,
        num_pages: int | None = None,
        chunks: tuple[tuple[int, int], ...] | None = None,
    ) -> "EngineSize":
        """A size, checked; None is the usual capacity, pages for every slot to be full, a CPU's chunks.

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
        return cls(slots, capacity, num_pages, _CPU_CHUNKS if chunks is None else chunks)

    @property
    def pages_per_slot(self) -> int:
        """Pages that a slot can name."""
        return pages_for(self.capacity)

    @property
    def chunk_rows(self) -> int:
        """Rows of the largest forward of prompts."""
        return max(prompts * rows for prompts, rows in self.chunks)


def default_capacity(config: ModelConfig, need: int) -> int:
    """Tokens per slot: the usual capacity, or the next power of two that holds ``need``."""
    usual = max(DEFAULT_CAPACITY, 1 << (need - 1).bit_length() if need else 0)
    return min(usual, config.max_position_embeddings)


def chunks_for(slots: int, *, gpu: bool) -> tuple[tuple[int, int], ...]:
    """The usual shapes of forwards of prompts that so many slots have a use for."""
    return tuple(shape for shape in (_GPU_CHUNKS if gpu else _CPU_CHUNKS) if shape[0] <= slots)


def slots_for(count: int, max_slots: int) -> int:
    """Slots for ``count`` prompts: a power of two, so that few programs serve all batch sizes.

    Raises:
        TypeError: ``max_slots`` is no integer.
        ValueError: ``max_slots`` is less than 1.
    """
    check_integer("max_slots", max_slots, 1)
    return min(1 << max(count - 1, 0).bit_length(), max_slots)
