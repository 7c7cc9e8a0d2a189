"""Figures of an engine that serves many callers, for whoever watches it."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from jetspec_jax.engine.pages import PagePool
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.request import Request, State


@dataclass(frozen=True)
class EngineStats:
    """Figures of an engine by now, or of several together. Those that count only grow.

    Attributes:
        running: Requests that have a slot.
        waiting: Requests that wait for one.
        pages: How many there are.
        pages_used: Those that requests hold.
        pages_cached: Those that nobody holds, kept for requests that begin alike.
        prefix_queries: Tokens of all prompts that have got a slot.
        prefix_hits: Those of them that were in the stores already.
        preemptions: How often a request lost its slot.
        dispatches: Dispatches with rounds.
        drafts: Trees of more than a root that were verified.
        drafted_tokens: Tokens that were drafted.
        accepted_tokens: Those of them that the target agreed with, before any cut.
        accepted_by_depth: Of these, how many lay at depth 1, 2, 3, ….
        bucket: Nodes of the trees of the last dispatch; of several engines the largest.
        live_slots: Slots that the last dispatch was for.
        compilations: Programs that the process has compiled since the last warm-up, or since the start.
    """

    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_used: int = 0
    pages_cached: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    dispatches: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    bucket: int = 0
    live_slots: int = 0
    compilations: int = 0

    def __add__(self, other: "EngineStats") -> "EngineStats":
        """Those of both engines together."""
        summed = {name: own + getattr(other, name) for name, own in vars(self).items()}
        depths = itertools.zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        summed |= {"accepted_by_depth": tuple(map(sum, depths)), "bucket": max(self.bucket, other.bucket)}
        return EngineStats(**summed)


class Tally:
    """Counts what a loop has done for requests, with one engine after the other."""

    def __init__(self) -> None:
        """Begins at nothing."""
        self._ended = EngineStats()
        self._rounds = EngineStats()

    def add_request(self, request: Request) -> None:
        """Counts a request that is over."""
        self._ended += _of_request(request)

    def add_dispatch(self, record: DispatchRecord) -> None:
        """Counts a dispatch."""
        if not len(record.tokens):
            return
        ran = record.tree_sizes > 0
        accepted = (record.tokens[ran] >= 0).sum(axis=1) - 1
        # One that reached a depth reached all before it.
        reached = np.bincount(accepted[accepted > 0])[::-1].cumsum()[::-1][1:] if (accepted > 0).any() else ()
        own = EngineStats(
            dispatches=1,
            drafts=int((record.tree_sizes[ran] > 1).sum()),
            drafted_tokens=int(record.tree_sizes[ran].sum() - ran.sum()),
            accepted_tokens=int(accepted.sum()),
            accepted_by_depth=tuple(map(int, reached)),
        )
        last = {"bucket": record.bucket, "live_slots": len(record.live)}
        self._rounds = EngineStats(**{**vars(self._rounds + own), **last})

    def stats(self, requests: Iterable[Request], num_pages: int, pool: PagePool | None) -> EngineStats:
        """All by now.

        Args:
            requests: Those that are not over.
            num_pages: Pages that there are, or will be.
            pool: The engine's pages; None where there is no engine.
        """
        pages = EngineStats(pages=num_pages)
        if pool is not None:
            pages += EngineStats(pages_used=num_pages - pool.num_free, pages_cached=pool.num_cached)
        return sum(map(_of_request, requests), self._ended + self._rounds + pages)


def _of_request(request: Request) -> EngineStats:
    state, begun = request.state, request.started is not None
    return EngineStats(
        running=int(state in (State.PREFILLING, State.DECODING)),
        waiting=int(state is State.WAITING),
        prefix_queries=len(request.prompt) if begun else 0,
        prefix_hits=request.prefix_tokens,
        preemptions=request.preemptions,
    )
