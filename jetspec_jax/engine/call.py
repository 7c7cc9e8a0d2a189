"""A call: requests of one caller, or a function, that wait for an engine loop; and the flag it waits for."""

import contextlib
import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.processes import spans
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.request import Request

if TYPE_CHECKING:  # the loop imports this module
    from jetspec_jax.engine.loop import EngineLoop


class Flag:
    """A `threading.Event` that an interrupt of one thread cannot leave locked for other threads.

    An event acquires its lock in Python code, where an interrupt may leave it locked.
    """

    def __init__(self) -> None:
        self._set: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Sets the flag; wakes the waiting thread."""
        self._set.put(None)

    def wait(self, seconds: float | None = None) -> None:
        """Waits until the flag is set, or for ``seconds``; only one thread may wait at a time."""
        with contextlib.suppress(queue.Empty):
            self._set.get(timeout=seconds)
            self._set.put(None)

    def clear(self) -> None:
        """Clears the flag."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._set.get_nowait()


@dataclass(eq=False)
class Call:
    """Requests of one caller, or a function to run, for the loop of a target.

    Attributes:
        plan: The `EnginePlan` of the required engine; None if ``work`` needs no engine.
        weights: That engine's parameters, as `DecodeWeights`.
        queue: Requests that are not admitted yet; the calls of several copies of a target share one queue.
        most_admitted: Most requests that are admitted at a time, so that other callers' requests run in
            between; None admits all.
        work: A function that the loop runs once, between two dispatches; None afterwards.
        news: Set when requests have new tokens or the call has failed; calls that share a queue share it.
        ready: Set while the caller waits, having read all tokens.
        admitted: Requests in the engine.
        error: The engine's or the function's error; the requests have the same error.
    """

    loop: "EngineLoop"
    plan: Any = None
    weights: Any = None
    queue: deque[Request] = field(default_factory=deque)
    most_admitted: int | None = None
    work: Callable[[], Any] | None = None
    news: Flag = field(default_factory=Flag)
    ready: Flag = field(default_factory=Flag)
    admitted: list[Request] = field(default_factory=list)
    error: BaseException | None = None
    result: Any = None

    @property
    def requests(self) -> list[Request]:
        """Admitted requests, then queued ones."""
        return [*self.admitted, *self.queue]

    @property
    def over(self) -> bool:
        """Whether all its requests and its function have ended."""
        return self.work is None and not any(request.open for request in self.requests)

    @property
    def in_callers_thread(self) -> bool:
        """Whether its caller runs the steps, because processes that share a mesh make the same calls."""
        return spans(self.loop.mesh) and not (self.plan is not None and self.plan.persistent)

    @property
    def count(self) -> int:
        """Most of its requests that decode together."""
        most = self.most_admitted or len(self.requests)
        return 0 if self.plan is None else min(most, self.plan.size.slots)

    def is_served_by(self, plan: EnginePlan, weights: DecodeWeights, *, joining: bool) -> bool:
        """Whether an engine can serve it: see `EnginePlan.serves`."""
        same = self.plan.decoder.proposer is None or weights.proposer is self.weights.proposer
        return same and plan.serves(self.plan, self.count, joining=joining)

    def fail(self, error: Exception) -> None:
        """Fails all its requests, and wakes the caller."""
        self.error, self.work = error, None
        for request in self.requests:
            request.fail(error)
        self.queue.clear()
        self.news.set()
