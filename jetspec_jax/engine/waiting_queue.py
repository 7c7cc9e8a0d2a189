"""The waiting queue: the order of service, and its length limit."""

from collections.abc import Iterable, Sequence

from jetspec_jax.engine.request import Request

#: A request that more urgent, later requests overtook this often goes first.
MOST_OVERTAKEN = 64


class QueueFull(RuntimeError):
    """The waiting queue is full; the request was not queued, and may be submitted again."""


def rank(request: Request) -> tuple[int, int]:
    """Sort key of a request: priority first, then arrival.

    A preempted request keeps its place, before all of its priority that never had a slot, and counts as
    overtaken by requests that use its pages. A request that was overtaken `MOST_OVERTAKEN` times goes before
    all others, whatever their priority. So no request starves: from then on a finite number is before it,
    and the first request in order is never preempted.
    """
    if request.overtaken >= MOST_OVERTAKEN:
        return -(2**63), request.number  # below any priority that a caller can give
    return request.priority, request.number


def count_overtaken(admitted: Request, waiting: Iterable[Request]) -> None:
    """Counts the admission for all waiting requests that arrived earlier."""
    for request in waiting:
        if request.number < admitted.number:
            request.overtaken += 1


def check_room(waiting: int, coming: int, most: int) -> None:
    """Raises QueueFull if more than ``most`` requests would wait once ``coming`` new ones have come.

    ``waiting`` are the present ones beyond the number of slots; negative if slots are free.
    """
    if waiting + coming > most:
        beside = f", and {coming} have come" if coming > 1 else ""
        raise QueueFull(
            f"{max(waiting, 0)} requests wait already{beside}; no more than {most} may wait: try again later"
        )


def in_order(requests: Iterable[Request]) -> Sequence[Request]:
    """Requests in order of service."""
    return sorted(requests, key=rank)
