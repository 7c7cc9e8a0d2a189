"""Pages on the host: the pool with its prefix cache, snapshots of slots, and what each request gets."""

import hashlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from jetspec_jax.cache.pages import NO_PAGE, PAGE_SIZE
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import EngineSize


def page_keys(
    tokens: Int32[np.ndarray, "S"], parent: bytes | None = None, salt: str | None = None
) -> list[bytes]:
    """Keys of a sequence's full pages: equal keys mean equal sequences up to the page's end.

    A key is a digest of the page's tokens and of the key before it, ``parent``, so collisions cannot be
    constructed. A page's own tokens are not enough: cached keys and values depend on all earlier tokens.
    Sequences with different salts, or without one, share no keys.
    """

    def digest(data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=32).digest()

    if parent is None:
        parent = digest(b"" if salt is None else b"salt" + salt.encode())
    keys, data = [], tokens.astype("<i4", copy=False)
    for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE):
        parent = digest(parent + data[end - PAGE_SIZE : end].tobytes())
        keys.append(parent)
    return keys


class PagePool:
    """An engine's pages, each of which is free, in use, or cached.

    A page number is a row of the target's stores and of the head's, which are written together. A page *in
    use* has one or more requests. Once it is full of committed tokens that the head has seen, `register`
    gives it a key: it is then read-only, and requests with the same prefix may use it too. After its last
    request it stays *cached* under its key until its place is needed. Cached pages are evicted in the order
    they were released.

    Only pages are shared. Layers that store a slot's tokens elsewhere need `Snapshots` as well. Without
    these, pools of such targets share nothing.
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

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest cached prefix."""
        found = []
        for key in keys:
            page = self._pages.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def allocate(self, count: int, shared: Sequence[int] = (), *, spare: int = 0) -> list[int] | None:
        """Allocates ``count`` pages: first the ``shared`` ones, which `find` returned, then new ones.

        Cached pages are evicted if there are too few free ones; ``spare`` unused pages must remain. None,
        without any change, if there are too few.
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

    def forget(self) -> None:
        """Empties the prefix cache; requests keep their pages."""
        self._free += self._cached
        for known in (self._cached, self._pages, self._keys):
            known.clear()

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        del self._pages[self._keys.pop(page)]
        return page


class Snapshots:
    """Places for copies of slots' rings and states, by the key of the last page before them.

    A layer with a ring of its window, or a recurrent state, stores a slot's tokens outside the pages. To
    start after shared pages, a slot also needs this store as it was at their end. Only prefill forwards that
    end there leave it, so chunks are cut there. A page's key stands for all tokens up to its end, and so
    does a snapshot's. The least recently used one is reused first. Pages do not depend on snapshots.
    """

    def __init__(self, count: int):
        """All places are free; if their count is 0, requests share prefixes by pages alone."""
        self.count = count
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
        place = self._free.popleft() if self._free else self._places.popitem(last=False)[1]
        self._places[key] = place
        return place


class PageAllocator:
    """Pages of an engine's requests.

    A running request has the pages of its prompt and of at least one more round. If pages run out, they come
    from, in this order:

    1. unused cached pages;
    2. pages that other requests have beyond their next round;
    3. the running request that is last in order. It is preempted: it loses its slot and pages, waits again
       before all later requests, and then prefills its prompt and its tokens. Noise depends on positions
       only, so its tokens stay the same.

    The first request in order is never preempted, and the pool is large enough for it. So it ends, and the
    next request becomes the first.

    "More" and "beyond" count from the most tokens that rounds in flight may commit. So no page that such a
    round may write is ever taken from its request.
    """

    def __init__(self, size: EngineSize, round_tokens: int):
        """All pages are free; a round commits at most ``round_tokens`` tokens to a slot."""
        self.pool = PagePool(size.num_pages, shares=size.shares_pages)
        self.snapshots = Snapshots(size.snapshots)
        self._table_size, self._round_tokens = size.pages_per_slot, round_tokens
        # Requests whose block tables have changed.
        self._changed: set[Request] = set()

    def changed(self) -> set[Request]:
        """Requests whose block tables have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def table(self, request: Request) -> Int32[np.ndarray, "T"]:
        """A request's block table, padded with `NO_PAGE`."""
        table = np.full(self._table_size, NO_PAGE, np.int32)
        table[: len(request.pages)] = request.pages
        return table

    def free(self, request: Request) -> None:
        """Frees a request's pages."""
        self.pool.free(request.pages)
        request.pages = []

    def make_room(self, running: list[Request], *, preempts: bool = True) -> bool | None:
        """Allocates pages for a round of every running request; False if that preempted any.

        Preempted requests are removed from ``running``, which is in order of service. None if there are too
        few pages, and none may be preempted.
        """
        count = len(running)
        for request in tuple(running):
            while request.slot >= 0:
                missing = request.pages_ahead(self._round_tokens) - len(request.pages)
                pages = self._allocate(missing, running) if missing > 0 else []
                if pages is not None:
                    self._add(request, pages)
                    break
                if not preempts:
                    return None
                last = running.pop()
                self.free(last)
                last.preempt()
        return len(running) == count

    def admit(self, request: Request, running: Sequence[Request]) -> bool:
        """Allocates a request's first pages, after the shared ones; False if there are too few."""
        keys = self._keys(request)
        found = self.pool.find(keys)
        shared = found[: self.snapshots.longest(keys[: len(found)])]
        # A page stays free for each running request that may grow: else this request would soon be preempted.
        spare = sum(len(other.pages) < other.num_pages for other in running)
        pages = self._allocate(request.pages_ahead(self._round_tokens), running, shared, spare=spare)
        if pages is None:
            return False
        request.pages, request.cached_pages, request.committed = pages, len(shared), PAGE_SIZE * len(shared)
        # Snapshots at the prompt's end, and at its cached prefix's end, where later prompts may diverge too.
        ends = {len(found), len(keys)} if self.snapshots.count else ()
        request.cuts = sorted(end for end in ends if end > len(shared))
        return True

    def snapshot_to_restore(self, request: Request) -> int | None:
        """The snapshot that a newly admitted request starts from; None if it needs none."""
        if not self.snapshots.count or not request.committed:
            return None
        return self.snapshots.use(self._keys(request)[request.cached_pages - 1])

    def snapshot_to_keep(self, request: Request) -> int | None:
        """The place for a snapshot after a prefill forward of a request; None if no snapshot is due."""
        if not request.cuts or request.committed < PAGE_SIZE * request.cuts[0]:
            return None
        end = request.cuts.pop(0)
        self.cache_full_pages([request])
        return self.snapshots.keep(self._keys(request)[end - 1])

    def grow(self, request: Request, tokens: int) -> None:
        """Allocates pages for ``tokens`` more tokens, as far as pages are unused."""
        missing = max(request.pages_ahead(tokens) - len(request.pages), 0)
        self._add(request, self.pool.allocate(min(missing, self.pool.num_free)) or [])

    def cache_full_pages(self, requests: Iterable[Request]) -> None:
        """Puts the requests' full pages into the prefix cache."""
        for request in requests:
            full = request.committed // PAGE_SIZE
            if request.pages and full > request.cached_pages and self.pool.shares:
                keys = self._keys(request)
                new = slice(request.cached_pages, full)
                self.pool.register(request.pages[new], keys[new])
                request.cached_pages = full

    def waits_for_others(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether a running request is filling the next page that this request needs.

        With snapshots: whether a running request will keep a longer snapshot that this request can use.
        """
        keys = self._keys(request)
        found = len(self.pool.find(keys))
        if self.snapshots.count:
            there, most = self.snapshots.longest(keys[:found]), len(keys)
            ends = ((other, end) for other in running for end in other.cuts if there < end <= most)
            return any(other.keys[end - 1] == keys[end - 1] for other, end in ends)
        return found < len(keys) and any(keys[found] in other.keys[other.cached_pages :] for other in running)

    def _allocate(
        self, count: int, running: Sequence[Request], shared: Sequence[int] = (), spare: int = 0
    ) -> list[int] | None:
        """As `PagePool.allocate`; if pages run out, other requests lose theirs beyond the next round."""
        pages = self.pool.allocate(count, shared, spare=spare)
        if pages is None:
            for request in running:
                enough = request.pages_ahead(self._round_tokens)
                if len(request.pages) > enough:
                    self.pool.free(request.pages[enough:])
                    del request.pages[enough:]
                    self._changed.add(request)
            pages = self.pool.allocate(count, shared, spare=spare)
        return pages

    def _add(self, request: Request, pages: list[int]) -> None:
        if pages:
            request.pages += pages
            self._changed.add(request)

    def _keys(self, request: Request) -> list[bytes]:
        """Keys of the full pages before a request's anchor; empty if pages are not shared."""
        full = (request.length - 1) // PAGE_SIZE if self.pool.shares else 0
        known = len(request.keys)
        if known < full:
            parent = request.keys[-1] if known else None
            tokens = request.span(PAGE_SIZE * known, PAGE_SIZE * full)
            request.keys += page_keys(tokens, parent, request.cache_salt)
        return request.keys
