"""Allocates pages to requests: shared prefixes, pages of coming rounds, and preemption."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from jetspec_jax.cache.pages import NO_PAGE, PAGE_SIZE
from jetspec_jax.engine.pages import PagePool, page_keys
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.engine.snapshots import Snapshots


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
        self.snapshots = Snapshots(size.snapshots, self.pool)
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
