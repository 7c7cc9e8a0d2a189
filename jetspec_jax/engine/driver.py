"""The thread that serves the requests of many callers with one engine."""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Sequence

from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.device.processes import is_first
from jetspec_jax.engine.engine import LOST, Engine
from jetspec_jax.engine.line import check_room
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.request import EngineFailed, Request
from jetspec_jax.engine.serving import Group
from jetspec_jax.engine.stats import EngineStats, Tally
from jetspec_jax.engine.wants import Kind
from jetspec_jax.engine.wire import tell

# All that live, to be ended before the interpreter is: a thread that a program leaves in compiled code aborts
# the process. A fork has the threads of none.
_DRIVERS: "weakref.WeakSet[Driver]" = weakref.WeakSet()


def _end_all() -> None:
    for driver in tuple(_DRIVERS):
        driver.end()


# JAX is imported, so that its own functions for the exit run after this one.
atexit.register(_end_all)
os.register_at_fork(after_in_child=_DRIVERS.clear)


class Driver:
    """Takes requests at any time, and runs the engine of one copy of the models while there are any.

    Its thread lives as long as somebody waits for a request, and each of its dispatches is a turn among all
    who decode with the same target. `Request.told` says when there is news of a request.

    Attributes:
        error: Why the last dispatch failed; None if it did not.
    """

    def __init__(self, group: Group, plan: EnginePlan, max_waiting: int):
        """Starts nothing.

        Args:
            group: The models.
            plan: Of an engine that stands.
            max_waiting: Requests that may wait for a slot.
        """
        self._group, self._plan, self._max_waiting = group, plan, max_waiting
        self.error: Exception | None = None
        # Guards what follows; held for moments only.
        self._mutex = threading.Lock()
        self._tally = Tally()
        self._requests: list[Request] = []
        self._guests: set[Request] = set()
        self._arrived: list[Request] = []
        self._thread: threading.Thread | None = None
        self._closed = False
        # Whether other processes follow this one.
        self._leads = plan.led and is_first()
        group.target.keeper.driver = weakref.ref(self)
        _DRIVERS.add(self)

    @property
    def slots(self) -> int:
        """Requests that may decode at the same time."""
        return self._plan.size.slots

    @property
    def work(self) -> int:
        """Requests that wait or run."""
        return sum(request.open for request in tuple(self._requests))

    def serves(self, group: Group, plan: EnginePlan) -> bool:
        """Whether calls that need an engine of a plan, with a group's models, may submit their requests."""
        heads = [own.head and own.head.weights for own in (group, self._group)]
        same = plan.decoder.proposer is None or heads[0] is heads[1]
        return not self._closed and same and self._plan.on(group.target.mesh).takes(plan)

    def submit(self, requests: Sequence[Request], *, guests: bool = False) -> None:
        """Takes requests, all or none; from any thread, which waits for nobody.

        Args:
            requests: The requests.
            guests: They are those of a call that is not this driver's own, and sees to it that they are few:
                they are never refused, and outlive `close`.

        Raises:
            QueueFull: Too many wait already.
            RuntimeError: The driver is closed.
        """
        with self._mutex:
            if guests:
                self._guests |= set(requests)
            else:
                self._check_open()
                served = sum(request.open for request in self._requests)
                check_room(served - self.slots, len(requests), self._max_waiting)
            now = time.monotonic()
            for request in requests:
                request.arrival = request.arrival or now
            self._requests += requests
            self._arrived += requests
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jetspec-engine", daemon=True)
                self._thread.start()

    def compile(self, kinds: Sequence[Kind], *, scores: bool) -> None:
        """Makes the engine, and compiles all its programs as `Engine.compile` does.

        Raises:
            RuntimeError: The driver is closed.
        """
        with self._group.target.keeper.turn():
            self._check_open()
            self._group.engine(self._plan).compile(kinds, scores=scores)

    def stats(self) -> EngineStats:
        """Figures by now; from any thread, which waits for nobody."""
        engine: Engine | None = self._group.target.keeper.engine
        mine = engine is not None and not engine.broken and engine.plan.stands
        with self._mutex:
            pool = engine.scheduler.pool if engine is not None and mine else None
            return self._tally.stats(self._requests, self._plan.size.num_pages, pool)

    def close(self) -> None:
        """Ends all requests but guests with an error, takes no more, and waits until they are gone."""
        with self._mutex:
            self._closed, thread = True, self._thread
            for request in self._requests:
                if request not in self._guests:
                    request.fail(RuntimeError("this AsyncLLM was closed"))
            shared = any(request.open for request in self._guests)
        if thread is not None and not shared:
            thread.join()
        self._let_go(None)

    def end(self) -> None:
        """Ends all requests with an error, also those of guests, and waits until the thread has ended."""
        with self._mutex:
            self._closed, thread = True, self._thread
            for request in self._requests:
                request.fail(RuntimeError("the program has ended"))
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        engine = None
        while self._goes_on():
            try:
                with self._group.target.keeper.turn():
                    engine = self._step(engine)
                self.error = None
            except Exception as error:
                # Nobody may wait for an engine that is not there.
                self.error, engine = error, None
                self._fail(error)
                if not isinstance(error, DeviceMemoryError):
                    self._let_go(f"{type(error).__name__}: {error}")

    def _goes_on(self) -> bool:
        with self._mutex:
            everyone, self._requests = self._requests, []
            for request in everyone:
                if request.open:
                    self._requests.append(request)
                else:
                    request.tell()  # again: an interrupt may have struck who told it
                    self._tally.end(request)
            self._guests.intersection_update(self._requests)
            if not self._requests:
                self._arrived, self._thread = [], None
            return bool(self._requests)

    def _step(self, engine: Engine | None) -> Engine:
        """One dispatch; the engine that it was of."""
        if engine is not None and engine.broken and self._admitted():
            raise RuntimeError(LOST)  # by another thread, which has its own error
        if engine is None or not engine.busy or engine.broken:
            engine = self._group.engine(self._plan)  # others may have replaced it
        with self._mutex:
            arrived, self._arrived = self._arrived, []
        for request in arrived:
            if request.open:
                try:
                    engine.admit(request)
                except (ValueError, DeviceMemoryError) as error:
                    request.fail(error)
        if engine.busy or engine.runner.in_flight:
            engine.step()
            if engine.record is not None:
                with self._mutex:
                    self._tally.take(engine.record)
        return engine

    def _admitted(self) -> bool:
        """Whether somebody waits for a request that an engine has had."""
        with self._mutex:
            return sum(one.open for one in self._requests) > sum(one.open for one in self._arrived)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("this AsyncLLM is closed")

    def _let_go(self, words: str | None) -> None:
        """Ends those that follow, with an error or without; without them nobody is served any more."""
        if self._leads:
            self._leads, self._closed = False, True
            with self._group.target.keeper.turn():
                tell("end", words)

    def _fail(self, error: Exception) -> None:
        # Told apart from what is wrong with a request, whatever the type. A lack of memory has its own.
        ends = not isinstance(error, DeviceMemoryError)
        if ends:
            own, error = error, EngineFailed(str(error) or type(error).__name__)
            error.__cause__ = own
        with self._mutex:
            # Those that follow are about to end: nobody may come in between.
            self._closed = self._closed or (self._leads and ends)
            self._arrived = []
            for request in self._requests:
                request.fail(error)
