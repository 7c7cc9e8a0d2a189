"""Pages on the host: how many a request needs, and which are free."""

from collections import deque
from collections.abc import Iterable

from jetspec_jax.cache.slots import PAGE_SIZE


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


class PagePool:
    """The free pages of a pool: those that nobody holds."""

    def __init__(self, num_pages: int, held: Iterable[int] = ()):
        """Finds the free pages.

        Args:
            num_pages: Of the pool.
            held: Pages that somebody holds.
        """
        self.num_pages, held = num_pages, frozenset(held)
        self._free = deque(page for page in range(num_pages) if page not in held)

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def reserve(self, count: int) -> list[int] | None:
        """Takes ``count`` pages, or none at all when there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.popleft() for _ in range(count)]
