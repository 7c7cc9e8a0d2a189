"""The order in which requests are served, and how many may wait."""

from collections.abc import Iterable, Sequence

from jetspec_jax.engine.request import Request

#: One that was overtaken so often, by more urgent requests that came later, is overtaken by nobody any more.
MOST_OVERTAKEN = 64


class QueueFull(RuntimeError):
    """As many requests wait as may; the request was not taken, and may be brought again."""


def rank(request: Request) -> tuple[int, int]:
    """Sorts requests: by priority, and those of one priority as they came.

    A request that lost its slot keeps its place, before all of its priority that have never had one. It has
    been overtaken then by those that it made room for. Who was overtaken `MOST_OVERTAKEN` times goes before
    all that were not, whatever their priority. So nobody waits for ever: from then on only finitely many are
    before it, and the first of all is never preempted.
    """
    if request.overtaken >= MOST_OVERTAKEN:
        return _FIRST, request.number
    return request.priority, request.number


# Comes before any priority that a caller can give.
_FIRST = -(2**63)


def count_overtaken(admitted: Request, waiting: Iterable[Request]) -> None:
    """Notes who waits on though it came before one that was admitted."""
    for request in waiting:
        if request.number < admitted.number:
            request.overtaken += 1


def check_room(waiting: int, coming: int, most: int) -> None:
    """Raises QueueFull where more than ``most`` would wait.

    Args:
        waiting: Requests beyond the slots, before others come; negative where slots are free.
        coming: Requests that come together.
        most: Requests that may wait.
    """
    if waiting + coming > most:
        beside = f", and {coming} have come" if coming > 1 else ""
        raise QueueFull(
            f"{max(waiting, 0)} requests wait already{beside}; no more than {most} may wait: try again later"
        )


def in_order(requests: Iterable[Request]) -> Sequence[Request]:
    """Requests as they are served, first one first."""
    return sorted(requests, key=rank)
