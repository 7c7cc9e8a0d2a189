"""Figures of a request: where its time went, and what drafting brought."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jetspec_jax.engine.request import Request


@dataclass(frozen=True)
class RequestMetrics:
    """Figures of a request; times are in seconds, and None for what has not come.

    Attributes:
        queue_time: From its arrival until it first had a slot.
        time_to_first_token: From its arrival until its first tokens were handed out.
        decode_time: From then until its end.
        rounds: Rounds of speculation, or plain steps.
        drafts: Trees of more than a root that were verified.
        drafted_tokens: Nodes of its trees without their roots.
        accepted_tokens: Those that the target agreed with, before any cut.
        accepted_by_depth: Of these, how many lay at depth 1, 2, 3, …: as many rounds got so far.
        prefix_tokens: Tokens of its prompt that other requests had left in the stores.
        preemptions: How often it lost its slot to others, and went on later.
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
        """A request's, by now; of its first ``rounds`` rounds, where others came after its end."""
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
    """How many rounds accepted 1, 2, 3, … drafted tokens or more; a round's last token is not drafted."""
    return tuple(sum(length > depth for length in lengths) for depth in range(1, max(lengths, default=1)))
