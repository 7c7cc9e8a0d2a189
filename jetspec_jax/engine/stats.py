"""Statistics of an engine that serves many callers, for monitoring."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jetspec_jax.engine.pages import PagePool
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.request import Request, State


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine, or of several together. Counters only grow.

    Attributes:
        running: Requests with a slot.
        waiting: Requests that wait for a slot.
        pages: Number of pages.
        pages_used: Pages in use by requests.
        pages_cached: Unused pages in the prefix cache.
        prefix_queries: Prompt tokens of all requests that have had a slot.
        prefix_hits: Those of these tokens that were in the prefix cache.
        preemptions: Number of preemptions.
        dispatches: Dispatches with rounds.
        idle_rounds: Rounds for requests that had ended, one per round and request: where a batch is launched
            before the results of the one before are known, ends are known one batch late.
        drafts: Verified trees with more than a root.
        drafted_tokens: Drafted tokens.
        accepted_tokens: Drafted tokens that the target agreed with, before any cut.
        accepted_by_depth: Accepted tokens at depth 1, 2, 3, ….
        bucket: Nodes of the trees of the last dispatch; the largest of several engines.
        live_slots: Slots of the last dispatch.
        compilations: Programs that the process has compiled since the last warm-up, or since the start.
        programs_left: Programs that are still compiled in the background.
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
    idle_rounds: int = 0
    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_depth: tuple[int, ...] = ()
    bucket: int = 0
    live_slots: int = 0
    compilations: int = 0
    programs_left: int = 0

    def __add__(self, other: "EngineStats") -> "EngineStats":
        summed = {name: value + getattr(other, name) for name, value in vars(self).items()}
        depths = itertools.zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        summed |= {"accepted_by_depth": tuple(map(sum, depths)), "bucket": max(self.bucket, other.bucket)}
        return EngineStats(**summed)


class Tally:
    """Counts the work of a loop, over all its engines."""

    def __init__(self) -> None:
        self._counted = EngineStats()

    def add_request(self, request: Request) -> None:
        """Counts a request that has ended."""
        self._counted += _of_request(request)

    def add_dispatch(self, record: DispatchRecord, idle_rounds: int) -> None:
        """Counts a dispatch, of which some rounds were idle."""
        self._counted += EngineStats(idle_rounds=idle_rounds)
        if not len(record.tokens):
            return
        ran = record.tree_sizes > 0
        accepted = (record.tokens[ran] >= 0).sum(axis=1) - 1
        # A path that reached a depth reached all depths before it.
        reached = np.bincount(accepted[accepted > 0])[::-1].cumsum()[::-1][1:] if (accepted > 0).any() else ()
        dispatch = EngineStats(
            dispatches=1,
            drafts=int((record.tree_sizes[ran] > 1).sum()),
            drafted_tokens=int(record.tree_sizes[ran].sum() - ran.sum()),
            accepted_tokens=int(accepted.sum()),
            accepted_by_depth=tuple(map(int, reached)),
        )
        both = self._counted + dispatch
        self._counted = replace(both, bucket=record.bucket, live_slots=len(record.live))

    def stats(self, requests: Iterable[Request], num_pages: int, pool: PagePool | None) -> EngineStats:
        """Statistics so far, with requests that have not been counted as ended.

        Without an engine there is no pool, and ``num_pages`` are those of the engine to come.
        """
        pages = EngineStats(pages=num_pages)
        if pool is not None:
            pages += EngineStats(pages_used=pool.num_used, pages_cached=pool.num_cached)
        return sum(map(_of_request, requests), self._counted + pages)


def _of_request(request: Request) -> EngineStats:
    state, begun = request.state, request.started is not None
    return EngineStats(
        running=int(request.open and state is not State.WAITING),
        waiting=int(request.open and state is State.WAITING),
        prefix_queries=len(request.prompt) if begun else 0,
        prefix_hits=request.prefix_tokens,
        preemptions=request.preemptions,
    )
