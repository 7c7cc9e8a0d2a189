"""The page pool on the host: reference counts, the prefix cache, and free pages."""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from jetspec_jax.cache.pages import PAGE_SIZE


def pages_for(tokens: int) -> int:
    """Pages for ``tokens`` tokens."""
    return -(-tokens // PAGE_SIZE)


def page_keys(
    tokens: Int32[np.ndarray, "S"], parent: bytes | None = None, salt: str | None = None
) -> list[bytes]:
    """Keys of a sequence's full pages: equal keys mean equal sequences up to the page's end.

    A key is a digest of the page's tokens and of the key before it, so collisions cannot be constructed. A
    page's own tokens are not enough: cached keys and values depend on all earlier tokens.

    Args:
        tokens: Tokens from a page's beginning on; those of a last, partial page are ignored.
        parent: Key of the page before; None at the beginning.
        salt: At the beginning: sequences with different salts, or without one, share no keys.
    """
    if parent is None:
        parent = _digest(b"" if salt is None else b"salt" + salt.encode())
    keys, data = [], tokens.astype("<i4", copy=False)
    for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
        parent = _digest(parent + data[end - PAGE_SIZE : end].tobytes())
        keys.append(parent)
    return keys


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


class PagePool:
    """An engine's pages, each of which is free, in use, or cached.

    A page number is a row of the target's stores and of the head's, which are written together. A page *in
    use* has one or more requests. Once it is full of committed tokens that the head has seen, `register`
    gives it a key: it is then read-only, and requests with the same prefix may use it too. After its last
    request it stays *cached* under its key until its place is needed. Cached pages are evicted in the order
    they were released.

    Only pages are shared. Layers that store a slot's tokens elsewhere need snapshots as well: see
    `jetspec_jax.engine.snapshots`. Without snapshots, pools of such targets share nothing.
    """

    def __init__(self, num_pages: int, *, shares: bool = True):
        """All pages are free; only if the pool ``shares`` them, pages may be shared and cached."""
        self.num_pages, self.shares = num_pages, shares
        self._free = deque(range(num_pages))
        self._reference_counts: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        # The prefix cache: page of a key, and key of a page.
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Unused pages: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Unused pages in the prefix cache."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Pages of requests; from any thread."""
        return self.num_pages - self.num_free

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest cached prefix."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def has(self, key: bytes) -> bool:
        """Whether a page has this key."""
        return key in self._pages

    def allocate(self, count: int, shared: Sequence[int] = (), *, spare: int = 0) -> list[int] | None:
        """Allocates ``count`` pages: the ``shared`` pages, which `find` returned, and new pages.

        Cached pages are evicted if there are too few free ones; ``spare`` unused pages must remain.

        Returns:
            The pages, shared ones first; None, without any change, if there are too few.
        """
        missing = count - len(shared)
        if missing + spare > self.num_free - sum(page in self._cached for page in shared):
            return None
        for page in shared:
            self._reference_counts[page] = self._reference_counts.get(page, 0) + 1
            self._cached.pop(page, None)
        fresh = [self._free.popleft() if self._free else self._evict() for _ in range(missing)]
        self._reference_counts.update(dict.fromkeys(fresh, 1))
        return [*shared, *fresh]

    def free(self, pages: Sequence[int]) -> None:
        """Releases a sequence's last pages, the last one first: it is useless without the pages before it."""
        for page in reversed(pages):
            self._reference_counts[page] -= 1
            if self._reference_counts[page]:
                continue
            del self._reference_counts[page]
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)

    def register(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Puts full pages into the prefix cache; a key that another page has stays with that page."""
        if not self.shares:
            return
        for page, key in zip(pages, keys, strict=True):
            if page not in self._keys and key not in self._pages:
                self._keys[page], self._pages[key] = key, page

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless every page is in one state, with exactly these block tables."""
        counts = Counter(page for pages in tables for page in pages)
        assert counts == Counter(self._reference_counts), "reference counts"
        places = [*self._free, *self._reference_counts, *self._cached]
        assert sorted(places) == list(range(self.num_pages)), "every page is free, in use or cached"
        assert {key: page for page, key in self._keys.items()} == self._pages, "keys and pages"
        assert self._cached.keys() <= self._keys.keys(), "cached pages have a key"
        assert not self._keys.keys() & set(self._free), "pages with a key are not free"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        return page
