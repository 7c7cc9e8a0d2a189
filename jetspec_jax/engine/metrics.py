"""Metrics of a request: where its time went, and drafted and accepted tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetspec_jax.engine.request import Request


@dataclass(frozen=True)
class RequestMetrics:
    """Metrics of a request; times are in seconds, None if the event has not happened.

    Attributes:
        queue_time: From its arrival to its first slot.
        time_to_first_token: From its arrival to its first tokens.
        decode_time: From its first tokens to its end.
        rounds: Rounds of speculation, or plain steps.
        drafts: Verified trees with more than a root.
        drafted_tokens: Nodes of its trees without their roots.
        accepted_tokens: Drafted tokens that the target agreed with, before any cut.
        accepted_by_depth: Rounds that accepted at least 1, 2, 3, … drafted tokens.
        prefix_tokens: Tokens of its prompt that were in the prefix cache.
        preemptions: Number of preemptions.
    """

    queue_time: float | None
    time_to_first_token: float | None
    decode_time: float | None
    rounds: int
    drafts: int
    drafted_tokens: int
    accepted_tokens: int
    accepted_by_depth: tuple[int, ...]
    prefix_tokens: int
    preemptions: int

    @classmethod
    def of(cls, request: Request, rounds: int | None = None) -> "RequestMetrics":
        """Metrics so far; ``rounds`` excludes rounds after the output's end."""
        lengths, sizes = request.accept_lengths[:rounds], request.tree_sizes[:rounds]
        return cls(
            queue_time=_between(request.arrival, request.started),
            time_to_first_token=_between(request.arrival, request.first_token),
            decode_time=_between(request.first_token, request.ended),
            rounds=len(lengths),
            drafts=sum(size > 1 for size in sizes),
            drafted_tokens=sum(sizes) - len(sizes),
            accepted_tokens=sum(lengths) - len(lengths),
            accepted_by_depth=_at_least(lengths),
            prefix_tokens=request.prefix_tokens,
            preemptions=request.preemptions,
        )

    @property
    def acceptance_by_depth(self) -> tuple[float, ...]:
        """Share of the rounds whose accepted path reached depth 1, 2, 3, …."""
        return tuple(count / self.rounds for count in self.accepted_by_depth)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


def _at_least(lengths: Sequence[int]) -> tuple[Any, ...]:
    """Number of lengths that include 1, 2, 3, … drafted tokens; a round's last token is not drafted."""
    return tuple(sum(length > depth for length in lengths) for depth in range(1, max(lengths, default=1)))
