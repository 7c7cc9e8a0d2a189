"""The pages that requests hold: shared ones, those of rounds to come, and who gives them up for others."""

from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Int32

from jetspec_jax.cache.pages import NO_PAGE, PAGE_SIZE
from jetspec_jax.engine.pages import PagePool, page_keys
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.engine.snapshots import Snapshots


class Holdings:
    """What requests hold of a pool.

    A request that runs has the pages of its prompt and of one round more, at least. Where they are too few,
    these are taken in turn:

    1. pages that nobody holds, though they are cached;
    2. what others hold for rounds that needed less;
    3. slot and pages of the last in order that runs. It waits again, before all that came after it, and later
       goes on with its tokens as its prompt. Noise belongs to positions, so it gets the same tokens as if
       nothing had happened.

    The first in order never loses anything, and all pages together are enough for it; so it ends, and then
    another one is the first.
    """

    def __init__(self, size: EngineSize, round_tokens: int):
        """Nobody holds any.

        Args:
            size: How many there are.
            round_tokens: Tokens that a round commits to a slot, at most.
        """
        self.pool = PagePool(size.num_pages, shares=size.shares_pages)
        self.snapshots = Snapshots(size.snapshots, self.pool)
        self._table_size, self._round_tokens = size.pages_per_slot, round_tokens
        # Whose pages have changed.
        self._changed: set[Request] = set()

    def changed(self) -> set[Request]:
        """Those whose pages have changed since the last call."""
        changed, self._changed = self._changed, set()
        return changed

    def table(self, request: Request) -> Int32[np.ndarray, "T"]:
        """A request's block table."""
        table = np.full(self._table_size, NO_PAGE, np.int32)
        table[: len(request.pages)] = request.pages
        return table

    def free(self, request: Request) -> None:
        """Takes all pages from a request."""
        self.pool.give_back(request.pages)
        request.pages = []

    def make_room(self, running: list[Request]) -> bool:
        """Gets pages for a round of everyone that runs; false if somebody lost its slot for that.

        Those are no longer among ``running``, which is in order.
        """
        everyone = len(running)
        for request in tuple(running):
            while request.slot >= 0:
                missing = request.pages_ahead(self._round_tokens) - len(request.pages)
                pages = self._obtain(missing, running) if missing > 0 else []
                if pages is not None:
                    self._add(request, pages)
                    break
                last = running.pop()
                self.free(last)
                last.preempt()
        return len(running) == everyone

    def admit(self, request: Request, running: Sequence[Request]) -> bool:
        """Gives a request its first pages, behind those that it shares, if they are enough."""
        keys = self._keys(request)
        found = self.pool.find(keys)
        shared = found[: self.snapshots.longest(keys[: len(found)])]
        # A page is left for each that may need more: else what is given would soon be taken back.
        spare = sum(len(own.pages) < own.num_pages for own in running)
        pages = self._obtain(request.pages_ahead(self._round_tokens), running, shared, spare=spare)
        if pages is None:
            return False
        request.pages, request.named, request.committed = pages, len(shared), PAGE_SIZE * len(shared)
        # For whoever begins with the same prompt, and for whoever goes another way where this one does.
        ends = {len(found), len(keys)} if self.snapshots.count else ()
        request.cuts = sorted(end for end in ends if end > len(shared))
        return True

    def restored_from(self, request: Request) -> int | None:
        """The place of the snapshot that one just admitted goes on from; None where it needs none."""
        if not self.snapshots.count or not request.committed:
            return None
        return self.snapshots.use(self._keys(request)[request.named - 1])

    def kept_in(self, request: Request) -> int | None:
        """The place for a snapshot of what has just been committed of a prompt; None where none is due."""
        if not request.cuts or request.committed < PAGE_SIZE * request.cuts[0]:
            return None
        end = request.cuts.pop(0)
        self.name([request])
        return self.snapshots.keep(self._keys(request)[end - 1])

    def grow(self, request: Request, tokens: int) -> None:
        """Gets pages for so many tokens more, as far as nobody else loses any."""
        missing = max(request.pages_ahead(tokens) - len(request.pages), 0)
        self._add(request, self.pool.take(min(missing, self.pool.num_free)) or [])

    def name(self, requests: Iterable[Request]) -> None:
        """Lets others share the pages that requests have filled."""
        for request in requests:
            full = request.committed // PAGE_SIZE
            if request.pages and full > request.named and self.pool.shares:
                keys = self._keys(request)
                self.pool.share(request.pages[request.named : full], keys[request.named : full])
                request.named = full

    def waits_for_others(self, request: Request, running: Iterable[Request]) -> bool:
        """Whether one that runs is just filling the next page that it would have to fill.

        Where it would need a snapshot at the end of pages: whether one is to come that it can use, behind
        what there is.
        """
        keys = self._keys(request)
        found = len(self.pool.find(keys))
        if self.snapshots.count:
            there, most = self.snapshots.longest(keys[:found]), len(keys)
            ends = ((own, end) for own in running for end in own.cuts if there < end <= most)
            return any(own.keys[end - 1] == keys[end - 1] for own, end in ends)
        return found < len(keys) and any(keys[found] in own.keys[own.named :] for own in running)

    def _obtain(
        self, count: int, running: Sequence[Request], shared: Sequence[int] = (), spare: int = 0
    ) -> list[int] | None:
        """As `PagePool.take`; where pages are too few, also those that others hold for later rounds."""
        pages = self.pool.take(count, shared, spare=spare)
        if pages is None:
            for request in running:
                enough = request.pages_ahead(self._round_tokens)
                if len(request.pages) > enough:
                    self.pool.give_back(request.pages[enough:])
                    del request.pages[enough:]
                    self._changed.add(request)
            pages = self.pool.take(count, shared, spare=spare)
        return pages

    def _add(self, request: Request, pages: list[int]) -> None:
        if pages:
            request.pages += pages
            self._changed.add(request)

    def _keys(self, request: Request) -> list[bytes]:
        """Names of the full pages before a request's anchor, if it may share any."""
        full = (request.length - 1) // PAGE_SIZE if self.pool.shares else 0
        known = len(request.keys)
        if known < full:
            parent = request.keys[-1] if known else None
            tokens = request.span(PAGE_SIZE * known, PAGE_SIZE * full)
            request.keys += page_keys(tokens, parent, request.cache_salt)
        return request.keys
