"""Pages on the host: how many a request needs, and which are free."""

from collections import deque
from collections.abc import Iterable

from jetspec_jax.cache.slots import PAGE_SIZE


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


class PagePool:
    """The free pages of a pool: reserved when a request gets its slot, returned when it leaves."""

    def __init__(self, num_pages: int):
        """All pages are free at first."""
        self.num_pages = num_pages
        self._free = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def reserve(self, count: int) -> list[int] | None:
        """Takes ``count`` pages, or none at all when there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back."""
        self._free.extend(pages)
