"""The thread that serves the requests of many callers with one engine."""

import threading
from collections.abc import Sequence

from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.engine import LOST, Engine
from jetspec_jax.engine.line import check_room
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.request import Request, State
from jetspec_jax.engine.serving import Group


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
        self._requests: list[Request] = []
        self._arrived: list[Request] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def work(self) -> int:
        """Requests that wait or run."""
        return sum(request.open for request in tuple(self._requests))

    def submit(self, requests: Sequence[Request]) -> None:
        """Takes requests, all or none; from any thread, which waits for nobody.

        Raises:
            QueueFull: Too many wait already.
            RuntimeError: The driver is closed.
        """
        with self._mutex:
            if self._closed:
                raise RuntimeError("this AsyncLLM is closed")
            waiting = sum(request.state is State.WAITING for request in self._requests)
            check_room(waiting + len(requests) - 1, self._max_waiting)
            self._requests += requests
            self._arrived += requests
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="jetspec-engine", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Ends all requests with an error, takes no more, and waits for the thread."""
        with self._mutex:
            self._closed, thread = True, self._thread
            for request in self._requests:
                request.fail(RuntimeError("this AsyncLLM was closed"))
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

    def _goes_on(self) -> bool:
        with self._mutex:
            for request in self._requests:
                if not request.open:
                    request.tell()  # again: an interrupt may have struck who told it
            self._requests = [request for request in self._requests if request.open]
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
        return engine

    def _admitted(self) -> bool:
        with self._mutex:
            return len(self._requests) > len(self._arrived)

    def _fail(self, error: Exception) -> None:
        with self._mutex:
            self._arrived = []
            for request in self._requests:
                request.fail(error)
