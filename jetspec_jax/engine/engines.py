"""The engines of a target, its draft head and their copies, and the object that owns them."""

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jetspec_jax.checkpoint.loading import Head, Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.processes import is_first
from jetspec_jax.engine.engine import Engine, EngineClosed, State
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.programs import Kind
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.stats import EngineStats
from jetspec_jax.engine.worker import Workers, follow


class Engines:
    """One engine for each copy of the models, made when a request needs it; each request goes to one.

    After an error of its engine, the next request makes a new one. If slots are too short for a request, an
    idle engine is made anew with longer ones.
    """

    def __init__(
        self,
        target: Target,
        head: Head | None,
        plan: EnginePlan,
        *,
        longer_slots: bool = False,
        fewer_slots: bool = False,
        proposer_weights: Any = None,
        make: Callable[..., Engine] = Engine,
        owner: str = "LLM",
    ):
        """Engines without stores, of models that `jetspec_jax.engine.admission.check_models` has checked.

        Args:
            plan: The plan of each engine, on any of the meshes.
            longer_slots: Whether slots become longer if a request needs it; else it is refused.
            fewer_slots: As for `Engine`.
            proposer_weights: Parameters of a proposer other than the head's.
            make: Makes an engine.
            owner: Whose engines they are, for errors.
        """
        self.target, self.head, self.plan = target, head, plan
        self._longer_slots, self._fewer_slots, self._make = longer_slots, fewer_slots, make
        self._owner = owner
        self._proposer_weights = proposer_weights
        #: The other processes that share the models.
        self.workers = Workers(target.mesh)
        self._engines: list[Engine] = []
        self._past, self.closed = EngineStats(), False
        # Held while engines are made or closed.
        self._lock = threading.RLock()

    @property
    def follows(self) -> bool:
        """Whether this process follows process 0."""
        return self.workers.there and not is_first()

    @property
    def failed(self) -> bool:
        """Whether an error has closed an engine, and no request has made a new one."""
        return any(engine.failed for engine in self._engines)

    @property
    def warm(self) -> bool:
        """Whether there are engines, which compile nothing in the background."""
        return bool(self._engines) and not any(engine.left for engine in self._engines)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until all programs are compiled; None if no estimate is possible yet."""
        seconds = [engine.seconds_left for engine in self._engines]
        return None if None in seconds else max(filter(None, seconds), default=0.0)

    def engines(self, requests: Sequence[Request] = ()) -> list[Engine]:
        """The engines, made unless there are any, or anew if these have failed or the requests need it.

        Raises:
            ValueError: The requests need longer slots, and an engine serves other requests; or this process
                follows another.
            RuntimeError: The owner was closed.
        """
        with self._lock:
            self.check_open()
            copies = len(self.target.meshes)
            plan = self.plan.holding(requests, copies) if self._longer_slots else self.plan
            shorter = plan.size.capacity > self.plan.size.capacity
            if any(each.open_requests for each in self._engines if each.state is not State.CLOSED):
                if shorter:
                    need = max(request.most_tokens for request in requests)
                    raise ValueError(
                        f"a request needs {need} tokens, and the slots have {self.plan.size.capacity}, of an "
                        f"engine that serves other requests now: set capacity={plan.size.capacity} when the "
                        "models are loaded, or wait until the others have ended"
                    )
                plan = self.plan
            if plan != self.plan:
                self._drop()
                self.plan = plan
            self._engines = self._engines or [self._make_one(number) for number in range(copies)]
            for number, engine in enumerate(self._engines):
                if engine.state is State.CLOSED:
                    self._count(engine)
                    self._engines[number] = self._make_one(number)
            return list(self._engines)

    def submit(self, requests: Sequence[Request], most_waiting: int | None = None) -> list[Engine]:
        """Deals requests among the engines, each to one with the fewest requests; returns the engine of each.

        Raises:
            QueueFull: More than ``most_waiting`` requests would wait for a slot of the engine.
            Exception: As `engines`.
        """
        places: dict[Request, Engine] = {}
        while len(places) < len(requests):
            engines = self.engines(requests)
            counts = [engine.open_requests for engine in engines]
            dealt: list[list[Request]] = [[] for _ in engines]
            for request in requests:
                if request not in places:
                    fewest = counts.index(min(counts))
                    counts[fewest] += 1
                    dealt[fewest].append(request)
            for engine, mine in zip(engines, dealt, strict=True):
                with contextlib.suppress(EngineClosed):  # an error has closed it just now: dealt again
                    if mine:
                        engine.submit(mine, most_waiting)
                        places |= dict.fromkeys(mine, engine)
        return [places[request] for request in requests]

    def warm_up(self, kinds: Sequence[Kind], **settings: Any) -> None:
        """See `Engine.warm_up`."""
        for engine in self.engines():
            engine.warm_up(kinds, **settings)

    def stats(self) -> EngineStats:
        """Statistics of all engines together, past ones included; from any thread, without waiting."""
        engines, missing = self._engines, len(self.target.meshes) - len(self._engines)
        pages = EngineStats(pages=missing * self.plan.size.num_pages)
        return sum((engine.stats() for engine in engines), self._past + pages)

    def follow(self) -> None:
        """Runs what process 0 runs, until it closes or ends; blocks. For all other processes.

        Raises:
            ValueError: This is process 0, or it shares its models with no other process.
            OutOfStep: Process 0 does something else.
        """
        if not self.workers.there:
            raise ValueError("this process shares its models with no other process, so it is not a worker")
        if is_first():
            raise ValueError("process 0 serves requests; call follow() in the other processes only")
        follow(self.target, self.plan, self._weights(0))

    def close(self) -> None:
        """Closes the engines for good: their requests fail, and their stores are freed."""
        with self._lock:
            if not self.closed and not self.follows:
                self.closed = True
                self._drop()
                self.workers.send("end")

    def check_open(self) -> None:
        """Checks that requests can be served.

        Raises:
            ValueError: This process follows another.
            RuntimeError: The owner was closed.
        """
        if self.follows:
            raise ValueError("requests go to process 0; this process is a worker: call follow()")
        if self.closed:
            raise RuntimeError(f"this {self._owner} is closed")

    def _drop(self) -> None:
        engines, self._engines = self._engines, []
        for engine in engines:
            self._count(engine)

    def _count(self, engine: Engine) -> None:
        engine.close()
        self._past += replace(engine.stats(), pages=0, bucket=0, live_slots=0, programs_left=0)

    def _make_one(self, number: int) -> Engine:
        plan = self.plan.on(self.target.meshes[number])
        return self._make(plan, self._weights(number), fewer_slots=self._fewer_slots)

    def _weights(self, number: int) -> DecodeWeights:
        target = (self.target, *self.target.copies)[number]
        if self.head is None:
            return DecodeWeights(target.weights, self._proposer_weights)
        return DecodeWeights(target.weights, (self.head, *self.head.copies)[number].weights)
