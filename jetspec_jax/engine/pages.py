"""Pages on the host: who holds them, which of them others may share, and which are free."""

import hashlib
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from jetspec_jax.cache.pages import PAGE_SIZE


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


def page_keys(
    tokens: Int32[np.ndarray, "S"], parent: bytes | None = None, salt: str | None = None
) -> list[bytes]:
    """Names of a sequence's full pages: equal names are equal sequences up to the page's end.

    Each is a digest of the page's tokens and of the name before it, so that nobody can make two sequences of
    one name. A key and a value depend on all tokens before theirs: a page's tokens alone would not do.

    Args:
        tokens: From a page's beginning on; those of a last page that is not full are not looked at.
        parent: Name of the page before; None at the beginning.
        salt: At the beginning: sequences with other salts, or without one, share no names.
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
    """The pages of an engine, each of which is one of three: free, held, or cached and held by nobody.

    A page number names rows of the target's stores and of the head's, which are written together. A *held*
    page has one holder or more. It has a name once it is full of committed tokens that the head has seen
    (`share`): then nobody writes it any more, and whoever needs the same tokens after the same ones may hold
    it too. When nobody holds it any longer it stays *cached* under its name, until its place is needed: the
    one that was given back first goes first.

    Only pages are shared. What a slot keeps in places of its own needs snapshots beside them: see
    `jetspec_jax.engine.snapshots`. Without those, pools of such targets share nothing.
    """

    def __init__(self, num_pages: int, *, shares: bool = True):
        """All pages are free.

        Args:
            num_pages: Of the pool.
            shares: Whether pages may be shared and cached.
        """
        self.num_pages, self.shares = num_pages, shares
        self._free = deque(range(num_pages))
        self._holders: dict[int, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        # Pages that have a name, both ways.
        self._pages: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Pages that nobody holds: free ones, and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody holds, which have a name."""
        return len(self._cached)

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest beginning of a sequence that the pool has."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def has(self, key: bytes) -> bool:
        """Whether some page has a name."""
        return key in self._pages

    def take(self, count: int, shared: Sequence[int] = (), *, spare: int = 0) -> list[int] | None:
        """Holds pages that `find` found, and as many more as are missing to ``count``.

        Cached pages are evicted for them, if there are not enough free ones.

        Args:
            count: How many pages.
            shared: Those of them that were found.
            spare: Pages that must be left that nobody holds.

        Returns:
            All of them, the shared ones first; None where there are not enough: then nothing has changed.
        """
        missing = count - len(shared)
        if missing + spare > self.num_free - sum(page in self._cached for page in shared):
            return None
        for page in shared:
            self._holders[page] = self._holders.get(page, 0) + 1
            self._cached.pop(page, None)
        fresh = [self._free.popleft() if self._free else self._evict() for _ in range(missing)]
        self._holders.update(dict.fromkeys(fresh, 1))
        return [*shared, *fresh]

    def give_back(self, pages: Sequence[int]) -> None:
        """Holds a sequence's last pages no longer.

        The last goes first: a page is of use to those only who find all pages before it.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._keys:
                self._cached[page] = None
            else:
                self._free.append(page)

    def share(self, pages: Sequence[int], keys: Sequence[bytes]) -> None:
        """Names held pages that are full for good; a name that another page has already stays that page's."""
        if not self.shares:
            return
        for page, key in zip(pages, keys, strict=True):
            if page not in self._keys and key not in self._pages:
                self._keys[page], self._pages[key] = key, page

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless every page is in one place, and held by just these holders."""
        counts = Counter(page for pages in holders for page in pages)
        assert counts == Counter(self._holders), "who holds which page"
        places = [*self._free, *self._holders, *self._cached]
        assert sorted(places) == list(range(self.num_pages)), "every page is free, held or cached"
        assert {key: page for page, key in self._keys.items()} == self._pages, "names and pages"
        assert self._cached.keys() <= self._keys.keys(), "what is cached has a name"
        assert not self._keys.keys() & set(self._free), "what has a name is not free"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        return page
