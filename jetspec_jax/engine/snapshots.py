"""Snapshots on the host: which places hold what slots knew at the ends of shared pages."""

from collections import OrderedDict, deque
from collections.abc import Sequence

from jetspec_jax.engine.pages import PagePool


class Snapshots:
    """Places for copies of the rings and states of slots, each under the name of the last page before it.

    A layer whose store is a ring of its window, or a recurrent state, keeps a slot's tokens in a place of the
    slot's own. To begin behind shared pages a slot also needs that place as it was at their end, which only
    prompts' forwards leave: these are cut there. A page's name stands for all tokens up to its end, and so
    does a snapshot's. While the pool has no page of that name the snapshot is of no use, and its place is the
    first to be taken; then that which was made or used the longest ago. What becomes of a snapshot leaves
    the pages as they are.
    """

    def __init__(self, count: int, pool: PagePool):
        """All places are free.

        Args:
            count: How many there are; with none, pages alone make a beginning that can be shared.
            pool: The pages.
        """
        self.count, self._pool = count, pool
        self._free = deque(range(count))
        # By name, the one used last at the end.
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def longest(self, keys: Sequence[bytes]) -> int:
        """Pages of the longest beginning at whose end there is a snapshot; all where none is needed."""
        if not self.count:
            return len(keys)
        return next((end for end in range(len(keys), 0, -1) if keys[end - 1] in self._places), 0)

    def use(self, key: bytes) -> int:
        """The place of a snapshot that there is."""
        self._places.move_to_end(key)
        return self._places[key]

    def keep(self, key: bytes) -> int | None:
        """A place for a new snapshot; None where there is one of that name, which is used."""
        if key in self._places:
            self.use(key)
            return None
        place = self._free.popleft() if self._free else self._evict()
        self._places[key] = place
        return place

    def check(self) -> None:
        """Raises AssertionError unless every place is free or has one name."""
        assert sorted([*self._free, *self._places.values()]) == list(range(self.count)), "places"

    def _evict(self) -> int:
        oldest = next(iter(self._places))
        return self._places.pop(next((key for key in self._places if not self._pool.has(key)), oldest))
