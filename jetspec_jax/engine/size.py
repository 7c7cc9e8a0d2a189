"""How much an engine holds at a time."""

from dataclasses import dataclass

from jetspec_jax.arguments import check_integer
from jetspec_jax.config import ModelConfig
from jetspec_jax.engine.pages import pages_for

MAX_SLOTS = 8
#: Tokens of a prompt that one launch commits.
PREFILL_CHUNK = 128
# Tokens that a slot can hold unless a request needs more: most requests then share their programs.
DEFAULT_CAPACITY = 1024


@dataclass(frozen=True)
class EngineSize:
    """How much an engine holds.

    Attributes:
        slots: Requests that decode at the same time.
        capacity: Tokens of a slot, prompt and output together.
        num_pages: Pages of all slots together.
    """

    slots: int
    capacity: int
    num_pages: int

    @classmethod
    def of(
        cls, target: ModelConfig, slots: int, capacity: int | None, num_pages: int | None = None
    ) -> "EngineSize":
        """A size, checked; None is the usual capacity, and pages enough for every slot to be full.

        Raises:
            TypeError: It is no integer.
            ValueError: It is out of its range.
        """
        limit = target.max_position_embeddings
        capacity = default_capacity(target, 0) if capacity is None else capacity
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, not {slots}")
        check_integer("capacity", capacity, 1, limit)
        return cls(slots, capacity, slots * pages_for(capacity) if num_pages is None else num_pages)

    @property
    def pages_per_slot(self) -> int:
        """Pages that a slot can name."""
        return pages_for(self.capacity)


def default_capacity(config: ModelConfig, need: int) -> int:
    """Tokens per slot: the usual capacity, or the next power of two that holds ``need``."""
    usual = max(DEFAULT_CAPACITY, 1 << (need - 1).bit_length() if need else 0)
    return min(usual, config.max_position_embeddings)


def slots_for(count: int, max_slots: int) -> int:
    """Slots for ``count`` prompts: a power of two, so that few programs serve all batch sizes.

    Raises:
        TypeError: ``max_slots`` is no integer.
        ValueError: ``max_slots`` is less than 1.
    """
    check_integer("max_slots", max_slots, 1)
    return min(1 << max(count - 1, 0).bit_length(), max_slots)
