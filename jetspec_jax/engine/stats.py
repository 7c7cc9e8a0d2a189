"""Statistics of an engine that serves many callers, for monitoring."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from jetspec_jax.engine.batch import BatchResult
from jetspec_jax.engine.pages import PagePool
from jetspec_jax.engine.request import Request, State


@dataclass(frozen=True)
class EngineStats:
    """Statistics of an engine, or of several together. Counters only grow."""

    running: int = 0  # requests with a slot
    waiting: int = 0  # requests that wait for a slot
    pages: int = 0
    pages_used: int = 0  # by requests
    pages_cached: int = 0  # unused, in the prefix cache
    prefix_queries: int = 0  # prompt tokens of all requests that have had a slot
    prefix_hits: int = 0  # those of these tokens that were in the prefix cache
    preemptions: int = 0
    dispatches: int = 0  # with rounds
    # Rounds for requests that had ended, one per round and request: where a batch is launched before the
    # results of the one before are known, ends are known one batch late.
    idle_rounds: int = 0
    drafts: int = 0  # verified trees with more than a root
    drafted_tokens: int = 0
    accepted_tokens: int = 0  # drafted tokens that the target agreed with, before any cut
    accepted_by_depth: tuple[int, ...] = ()  # at depth 1, 2, 3, …
    bucket: int = 0  # nodes of the trees of the last dispatch; the largest of several engines
    live_slots: int = 0  # of the last dispatch
    compilations: int = 0  # of the process since the last warm-up, or since the start
    programs_left: int = 0  # that are still compiled in the background

    def __add__(self, other: "EngineStats") -> "EngineStats":
        summed = {name: value + getattr(other, name) for name, value in vars(self).items()}
        depths = itertools.zip_longest(self.accepted_by_depth, other.accepted_by_depth, fillvalue=0)
        summed |= {"accepted_by_depth": tuple(map(sum, depths)), "bucket": max(self.bucket, other.bucket)}
        return EngineStats(**summed)


class Tally:
    """Counts the work of an engine."""

    def __init__(self) -> None:
        self._counted = EngineStats()

    def add_request(self, request: Request) -> None:
        """Counts a request that has ended."""
        self._counted += _of_request(request)

    def add_dispatch(self, result: BatchResult, idle_rounds: int) -> None:
        """Counts a dispatch, of which some rounds were idle."""
        self._counted += EngineStats(idle_rounds=idle_rounds)
        if not len(result.tokens):
            return
        ran = result.tree_sizes > 0
        accepted = (result.tokens[ran] >= 0).sum(axis=1) - 1
        # A path that reached a depth reached all depths before it.
        reached = np.bincount(accepted[accepted > 0])[::-1].cumsum()[::-1][1:] if (accepted > 0).any() else ()
        dispatch = EngineStats(
            dispatches=1,
            drafts=int((result.tree_sizes[ran] > 1).sum()),
            drafted_tokens=int(result.tree_sizes[ran].sum() - ran.sum()),
            accepted_tokens=int(accepted.sum()),
            accepted_by_depth=tuple(map(int, reached)),
        )
        both = self._counted + dispatch
        self._counted = replace(both, bucket=result.batch.bucket, live_slots=len(result.batch.live))

    def stats(self, requests: Iterable[Request], num_pages: int, pool: PagePool | None) -> EngineStats:
        """Statistics so far, with requests that have not been counted as ended; no pool without stores."""
        pages = EngineStats(pages=num_pages)
        if pool is not None:
            pages += EngineStats(pages_used=num_pages - pool.num_free, pages_cached=pool.num_cached)
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
