"""Snapshots on the host: their places, by the key of the last shared page."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from jetspec_jax.engine.pages import PagePool


class Snapshots:
    """Places for copies of slots' rings and states, by the key of the last page before them.

    A layer with a ring of its window, or a recurrent state, stores a slot's tokens outside the pages. To
    start after shared pages, a slot also needs this store as it was at their end. Only prefill forwards that
    end there leave it, so chunks are cut there. A page's key stands for all tokens up to its end, and so
    does a snapshot's. Snapshots whose pages were evicted are reused first, then the least recently used.
    Pages do not depend on snapshots.
    """

    def __init__(self, count: int, pool: PagePool):
        """All places are free; if their count is 0, requests share prefixes by pages alone."""
        self.count, self._pool = count, pool
        self._free = deque(range(count))
        # Places by key, the most recently used last.
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def longest(self, keys: Sequence[bytes]) -> int:
        """Pages of the longest prefix that ends with a snapshot; all pages if none is needed."""
        if not self.count:
            return len(keys)
        return next((end for end in range(len(keys), 0, -1) if keys[end - 1] in self._places), 0)

    def use(self, key: bytes) -> int:
        """The place of an existing snapshot."""
        self._places.move_to_end(key)
        return self._places[key]

    def keep(self, key: bytes) -> int | None:
        """A place for a new snapshot; None if one of this key exists, which then counts as used."""
        if key in self._places:
            self.use(key)
            return None
        place = self._free.popleft() if self._free else self._evict()
        self._places[key] = place
        return place

    def check(self) -> None:
        """Raises AssertionError unless every place is free or has one key."""
        assert sorted([*self._free, *self._places.values()]) == list(range(self.count)), "places"

    def _evict(self) -> int:
        oldest = next(iter(self._places))
        return self._places.pop(next((key for key in self._places if not self._pool.has(key)), oldest))
