"""The engine loop: one thread that owns a target's engine and serves all callers."""

import itertools
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax.sharding import Mesh

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.broadcast import send, send_end, sends
from jetspec_jax.engine.call import Call
from jetspec_jax.engine.engine import LOST, Engine
from jetspec_jax.engine.grammars import WorkerMatchers
from jetspec_jax.engine.memory import with_slots_that_fit
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.request import EngineFailed, Request
from jetspec_jax.engine.stats import EngineStats, Tally
from jetspec_jax.engine.threads import PROGRAM_ENDED, EngineThread, in_engine_thread
from jetspec_jax.engine.waiting_queue import check_room

T = TypeVar("T")
# Seconds that the loop waits for a caller to read its tokens, and between two checks whether a thread ended.
_MOMENT = 0.02
# Held for a step in a caller's thread.
_CALLERS_STEP = threading.RLock()
_log = logging.getLogger("jetspec_jax")


class EngineLoop:
    """Owns the engine of a target, which serves all calls in order of arrival.

    A call shares the slots with running calls if the engine can serve it. Else it waits until the engine is
    idle, and all later calls wait behind it; then a new engine replaces the old one, so that two sets of
    stores do not coexist.

    The thread lives while there are calls. Callers wait for a flag, so an interrupt affects the interrupted
    caller only. If several processes share the mesh and make the same calls, the callers run the steps, so
    that the devices of all processes get their programs in the order of the calls: see
    `jetspec_jax.engine.worker`.

    Attributes:
        engine: The engine; None before the first call.
        failed: Whether the last dispatch failed. The error itself would keep its callers' frames alive, and
            so the target.
        server: Returns the call of an `AsyncLLM`, whose persistent engine other calls join; or None.
        has_workers: Whether the other processes follow the server; an error of the engine ends them.
        grammars: Grammars of process 0's requests, if this is another process; None without grammars.
    """

    def __init__(
        self, mesh: Mesh | None, engine: Engine | None = None, grammars: WorkerMatchers | None = None
    ):
        self.mesh, self.engine, self.grammars = mesh, engine, grammars
        self.failed = False
        self.server: Callable[[], Call | None] = lambda: None
        self.has_workers, self.tally = False, Tally()
        # Protects the attributes below; held briefly.
        self._mutex = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._served: list[Call] = []
        self._failing: list[Call] = []
        self._thread: threading.Thread | None = None

    @property
    def open_requests(self) -> int:
        """Number of waiting and running requests."""
        return sum(request.open for call in self._calls for request in call.requests)

    def submit(self, call: Call, most_waiting: int | None = None) -> None:
        """Queues a call as a whole, without waiting.

        Raises:
            QueueFull: More than ``most_waiting`` requests would wait for a slot, not counting requests that
                calls have not admitted yet.
            RuntimeError: The program is exiting.
        """
        if PROGRAM_ENDED.is_set():
            raise RuntimeError("the program has ended")
        with self._mutex:
            if most_waiting is not None and call.plan is not None:
                served = sum(request.open for request in self._counted())
                check_room(served - call.plan.size.slots, len(call.queue), most_waiting)
            now = time.monotonic()
            for request in call.queue:
                request.arrival = request.arrival or now
            self._waiting.append(call)
        if not call.in_callers_thread:
            self._start()

    def _start(self) -> None:
        """Starts the thread, if there is none; without work it ends at once.

        If two threads start at once, one ends. An interrupt may occur here: the next call starts a thread.
        """
        if self._thread is None:
            EngineThread(self._run, "jetspec-engine").start()

    def run(
        self,
        work: Callable[[], T],
        plan: EnginePlan | None = None,
        weights: DecodeWeights | None = None,
    ) -> T:
        """Runs a function between two dispatches and waits for its result; no other call runs meanwhile.

        The ``plan`` and the parameters are those of the engine that it requires, if it needs one.

        Raises:
            Exception: The function's or the engine's error.
        """
        call = Call(self, plan, weights, work=work)
        try:
            self.submit(call)
            wait([call])  # raises the function's error
            while call.work is not None:
                wait([call])
        finally:
            call.work = None
        return call.result

    def launch(self) -> None:
        """Starts waiting calls, and launches batches while there are requests and room for them."""
        if self.engine is not None and self.engine.broken:
            self._fail(RuntimeError(LOST))
        while self.engine is None or self.engine.has_room:
            if self._begin() or self.engine is None:
                return
            if not self._served:
                return
            self._wait_for_readers(self.engine)
            self._admit(self.engine)
            if not self.engine.busy:
                return
            if not self.engine.launch():
                return

    def collect(self) -> None:
        """Waits for the oldest batch in flight, if any, and hands out its tokens."""
        if self.engine is not None and self._in_flight:
            for call in self._served:
                call.ready.clear()
            self.engine.collect()
            if self.engine.record is not None:
                with self._mutex:
                    self.tally.add_dispatch(self.engine.record)
            self.failed = False

    def free(self) -> None:
        """Frees the engine, unless it has requests; in all processes, if a call of all makes it."""
        self.run(self._free)

    @property
    def warms_up(self) -> bool:
        """Whether programs are still compiled in the background."""
        return self.engine is not None and self.engine.compiler.left > 0

    def stats(self, num_pages: int) -> EngineStats:
        """Statistics so far; from any thread, without waiting for a dispatch.

        ``num_pages`` are those of the persistent engine, also before it exists.
        """
        engine = self.engine
        with self._mutex:
            pool = engine.scheduler.pool if engine is not None and engine.plan.persistent else None
            left = 0 if engine is None else engine.compiler.left
            return self.tally.stats(self._counted(), num_pages, pool) + EngineStats(programs_left=left)

    def settle(self) -> None:
        """Waits until the thread has ended, unless it has requests."""
        thread = self._thread
        while thread is not None and thread.is_alive() and not self.open_requests:
            thread.join(_MOMENT)

    def _run(self) -> None:
        with self._mutex:
            if self._thread is not None:
                return
            self._thread = threading.current_thread()
        try:
            while self._has_work():
                try:
                    self.launch()
                    self.collect()
                except Exception as error:
                    self._fail(error)
        except BaseException as error:  # no caller may wait for a thread that has ended
            failed = EngineFailed(f"the engine's thread has ended: {error!r}")
            failed.__cause__ = error
            self._fail(failed, everyone=True)

    def _has_work(self) -> bool:
        if PROGRAM_ENDED.is_set():
            self._fail(RuntimeError("the program has ended"), everyone=True)
        with self._mutex:
            self._forget()
            if not (self._waiting or self._served or self._in_flight):
                self._end_thread()
            return self._thread is threading.current_thread()

    def _end_thread(self) -> None:
        if self.engine is not None:
            self.engine.scheduler.drop_closed()  # their errors keep callers' frames alive, and so the target
        self._thread = None

    def _forget(self) -> None:
        """Removes requests and calls that have ended."""
        for call in self._served:
            for request in call.admitted:
                if not request.open:
                    self.tally.add_request(request)
            call.admitted = [request for request in call.admitted if request.open]
        self._served = [call for call in self._served if not call.over]
        self._waiting = deque(call for call in self._waiting if not call.over)

    def _begin(self) -> bool:
        """Starts waiting calls while the engine can serve them.

        Returns:
            Whether no batch may be launched now: a function ran, or it, or another engine, waits until
            nothing is in flight.
        """
        with self._mutex:
            self._forget()
        while self._waiting:
            call = self._waiting[0]
            if call.work is not None and self._in_flight:
                return True
            if not call.over:
                served = self._can_serve(call)
                if not served and self._served:
                    return False  # later calls wait behind it
                alone = not self._served
                if alone and self._in_flight:
                    return True
                try:
                    if not served:
                        self.make_engine(call)
                    if alone:
                        self._prepare(call)
                except Exception as error:
                    # An engine that is too large for one caller is not a failure of a server.
                    self.failed = self.failed or (call.plan is not None and call.plan.persistent)
                    call.fail(error)
                    if self.engine is not None and self.engine.broken:
                        self.drop_idle()
            with self._mutex:
                if call.work is None and not call.over:
                    self._served.append(call)
                self._waiting.popleft()  # last: an interrupt of a caller that runs the steps loses no call
            if call.work is not None:
                self._run_work(call, call.work)
                return True
        return False

    def _can_serve(self, call: Call) -> bool:
        engine = self.engine
        if call.plan is None or engine is None:
            return call.plan is None
        joining = bool(self._served) or (engine.plan.persistent and self.server() is not None)
        return call.is_served_by(engine.planned, engine.weights, joining=joining)

    def make_engine(self, call: Call) -> None:
        """Replaces an idle engine by a call's.

        Raises:
            DeviceMemoryError: The device cannot hold it.
        """
        if sends(self.mesh):
            send("engine")
        self.drop_idle()  # frees its stores before new ones are allocated
        server = self.server()
        if server is not None and call.is_served_by(server.plan, server.weights, joining=True):
            call = server
        plan = call.plan if call.plan.persistent else with_slots_that_fit(call.plan, [self.mesh])
        self.engine = Engine(plan, call.weights, background=True)
        self.engine.planned = call.plan

    def _prepare(self, call: Call) -> None:
        """Compiles what a call needs; an engine without memory for its features is made anew, smaller."""
        requests = call.requests[: call.count]
        if self.engine is None:
            return
        try:
            self.engine.prepare(requests)
        except DeviceMemoryError:
            has = self.engine.plan.extras
            if self.engine.broken or has | call.plan.extras == has:
                raise
            self.make_engine(call)
            self.engine.prepare(requests)

    def _run_work(self, call: Call, work: Callable[[], Any]) -> None:
        try:
            call.result = work()
        except BaseException as error:
            call.error = error  # raised in the caller's thread
        call.work = None
        call.news.set()

    def _wait_for_readers(self, engine: Engine) -> None:
        """Waits briefly for callers to find their stop strings, or the next batch would be wasted.

        If batches overlap they are short, and nobody waits.

        Before its first batch a caller is waited for too: if it began to wait while that runs, it would seem
        to have read the tokens.
        """
        for call in () if engine.runner.overlapped else self._served:
            next_batch = call.admitted or list(itertools.islice(call.queue, 1))
            if call.most_admitted and any(request.params.stop for request in next_batch if request.open):
                call.ready.wait(_MOMENT)

    def _admit(self, engine: Engine) -> None:
        for call in self._served:
            most = math.inf if call.most_admitted is None else min(call.count, engine.plan.size.slots)
            room = most - sum(request.open for request in call.admitted)
            while room > 0 and (request := self._next_of(call)) is not None:
                room -= request.open
                try:
                    if request.open:
                        engine.admit(request)
                except (ValueError, DeviceMemoryError) as error:
                    request.fail(error)

    def _next_of(self, call: Call) -> Request | None:
        with self._mutex:
            try:
                call.admitted.append(call.queue.popleft())
            except IndexError:  # another copy's loop admitted the last request
                return None
            return call.admitted[-1]

    def _fail(self, error: Exception, *, everyone: bool = False) -> None:
        """Fails the calls that the engine serves, or all calls; the next call makes a new engine."""
        with self._mutex:
            self.failed = True
            failed, self._served = self._served, []
            engine, self.engine = self.engine, None
            if everyone:
                failed += self._waiting
                self._waiting.clear()
                self._end_thread()
            self._failing = failed  # counted until they have failed
        # Workers get the same error for a lack of memory, and continue.
        ends = self.has_workers and not isinstance(error, DeviceMemoryError)
        self.has_workers = self.has_workers and not ends  # before a caller submits again
        if not failed:  # no caller learns of it
            _log.error("the engine failed between two calls", exc_info=error)
        for call in failed:
            call.fail(error)
        with self._mutex:
            for request in [request for call in failed for request in call.admitted]:
                self.tally.add_request(request)
            self._failing = []
        if engine is not None:
            engine.close()
        if ends:
            send_end(error=RuntimeError(f"process 0 has stopped serving: {type(error).__name__}: {error}"))

    def _free(self) -> None:
        if sends(self.mesh) and not self._served:
            send("free")
        self.drop_idle()

    def drop_idle(self) -> None:
        """Frees this process's engine, unless it has requests; in the loop's thread only."""
        if self.engine is not None and not self._served:
            engine, self.engine = self.engine, None
            engine.close()

    @property
    def _in_flight(self) -> bool:
        return self.engine is not None and bool(self.engine.runner.in_flight)

    @property
    def _calls(self) -> list[Call]:
        return [*self._waiting, *self._served]

    def _counted(self) -> list[Request]:
        """Waiting and running requests, except those that calls have not admitted yet."""
        counted = []
        for call in [*self._calls, *self._failing]:
            counted += call.requests if call.most_admitted is None else call.admitted
        return counted


# Loops by target, freed with it. All heads of a target share a loop, as their engines do not coexist.
_LOOPS: "weakref.WeakKeyDictionary[Target, EngineLoop]" = weakref.WeakKeyDictionary()


def loop_for(target: Target) -> EngineLoop:
    """The loop of a target, for any head."""
    known = _LOOPS.get(target)
    return known or _LOOPS.setdefault(target, EngineLoop(target.mesh, None, WorkerMatchers(target)))


def wait(calls: Sequence[Call]) -> None:
    """Waits for news of calls that share a flag; if callers run the steps, runs one step.

    Raises:
        RuntimeError: This is a loop's thread, which would wait for itself; or this process is a fork, which
            has no such thread.
        Exception: The error of an engine or a function.
    """
    if in_engine_thread():
        raise RuntimeError("an engine calls this function, and cannot wait for one: use another thread")
    thread = calls[0].loop._thread
    if thread is not None and not thread.is_alive():
        raise RuntimeError("this process is a fork, without the thread that serves this request")
    for call in calls:
        call.ready.set()
    if calls[0].in_callers_thread:
        with _CALLERS_STEP:
            for call in calls:
                call.loop.launch()
            calls[0].loop.collect()
    else:
        calls[0].news.wait()
        calls[0].news.clear()
    for call in calls:
        if call.error is not None:
            raise call.error
