"""The loop of an engine: one thread launches and collects for all callers of a target."""

import atexit
import contextlib
import math
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from jax.sharding import Mesh

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.device.processes import spans
from jetspec_jax.device.thread_config import configured, thread_config
from jetspec_jax.engine.broadcast import send
from jetspec_jax.engine.budget_policy import ROUNDS_TO_AN_END
from jetspec_jax.engine.engine import LOST, Engine
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.request import EngineFailed, Request
from jetspec_jax.engine.stats import EngineStats, Tally
from jetspec_jax.engine.waiting_queue import check_room

T = TypeVar("T")
# Loops with a thread, which ends before the interpreter does: a thread that a program leaves in compiled code
# aborts the process. A fork has the threads of none.
_RUNNING: "set[EngineLoop]" = set()
_PROGRAM_ENDED = threading.Event()
# Seconds that the loop waits for a caller to read its tokens, and between two looks at a thread that may end.
_MOMENT = 0.02
# Held for a step in a caller's thread.
_CALLERS_STEP = threading.RLock()


def _end_all() -> None:
    _PROGRAM_ENDED.set()
    for loop in tuple(_RUNNING):
        if (thread := loop._thread) is not None:
            thread.join()


# JAX is imported, so that its own functions for the exit run after this one.
atexit.register(_end_all)
os.register_at_fork(after_in_child=_RUNNING.clear)


class Flag:
    """A `threading.Event` that an interrupt of one thread cannot leave locked for the others.

    An event's lock is taken in Python, where an interrupt may strike between taking and releasing it.
    """

    def __init__(self) -> None:
        """Not set."""
        self._set: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        """Sets the flag; wakes a thread that waits for it."""
        self._set.put(None)

    def wait(self, seconds: float | None = None) -> None:
        """Returns once the flag is set, or after so many seconds; one thread at a time may wait."""
        with contextlib.suppress(queue.Empty):
            self._set.get(timeout=seconds)
            self._set.put(None)

    def clear(self) -> None:
        """Unsets the flag."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._set.get_nowait()


@dataclass(eq=False)
class Call:
    """Requests of one caller, or work, for the loop of a target.

    Attributes:
        loop: The loop.
        plan: The `EnginePlan` of the engine that is needed; None is any or none, for work alone.
        weights: That engine's parameters, as `DecodeWeights`.
        queue: Requests that have not been admitted; the calls of several copies of a target share one.
        most_admitted: Requests that are admitted at a time, so that other callers' come in between; None
            admits all.
        most_rounds: Rounds after which the caller wants to look, unless the engine stands for many.
        work: Done once, by the loop between two dispatches; None afterwards.
        news: Set whenever there is news; calls that share a queue share it.
        ready: Set while the caller waits, having read all news before.
        config: JAX's settings in the caller's thread.
        admitted: Requests that the engine has.
        error: Why engine or work failed; the requests have the same error.
        result: What the work returned.
    """

    loop: "EngineLoop"
    plan: Any = None
    weights: Any = None
    queue: deque[Request] = field(default_factory=deque)
    most_admitted: int | None = None
    most_rounds: int | None = None
    work: Callable[[], Any] | None = None
    news: Flag = field(default_factory=Flag)
    ready: Flag = field(default_factory=Flag)
    config: tuple[Any, ...] = field(default_factory=thread_config)
    admitted: list[Request] = field(default_factory=list)
    error: BaseException | None = None
    result: Any = None

    @property
    def requests(self) -> list[Request]:
        """Admitted requests, then queued ones."""
        return [*self.admitted, *self.queue]

    @property
    def over(self) -> bool:
        """Whether nothing is left to do for it."""
        return self.work is None and not any(request.open for request in self.requests)

    @property
    def in_callers_thread(self) -> bool:
        """Whether its caller makes the steps: processes that share a mesh make the same calls in step."""
        return spans(self.loop.mesh) and not (self.plan is not None and self.plan.has_workers)

    def is_served_by(self, plan: EnginePlan, weights: DecodeWeights, *, joining: bool) -> bool:
        """Whether an engine serves it: see `EnginePlan.serves`."""
        same = self.plan.decoder.proposer is None or weights.proposer is self.weights.proposer
        return same and plan.serves(self.plan, joining=joining)

    def fail(self, error: Exception) -> None:
        """Ends all its requests with an error, and tells the caller."""
        self.error, self.work = error, None
        for request in self.requests:
            request.fail(error)
        self.queue.clear()
        self.news.set()


class EngineLoop:
    """Owns the engine of a target, which serves all calls: first come, first served.

    A call that the engine suits shares its slots with those that run. One that needs another waits until the
    engine is idle, and all that come later wait behind it; then its engine takes the place of the other, so
    that two sets of stores do not coexist.

    The thread lives while there is something to do. Callers wait for news, so an interrupt strikes nobody
    else. Of a mesh of several processes the callers make the steps themselves, in all processes alike.

    Attributes:
        mesh: The target's devices.
        engine: The engine; None before the first call.
        failed: Whether the last dispatch failed. The error itself would hold its callers' frames, and so the
            target.
        server: Leads to a call of whatever serves others with an engine that stands: calls join that engine.
        has_workers: Whether other processes follow this one, until an error of the engine ends them.
        tally: Counts what it has done.
    """

    def __init__(self, mesh: Mesh | None, engine: Engine | None = None):
        """Starts nothing; an engine may be there to begin with."""
        self.mesh, self.engine = mesh, engine
        self.failed = False
        self.server: Callable[[], Call | None] = lambda: None
        self.has_workers, self.tally = False, Tally()
        self._config = thread_config()
        # Guards what follows; held for moments only.
        self._mutex = threading.Lock()
        self._waiting: deque[Call] = deque()
        self._served: list[Call] = []
        self._thread: threading.Thread | None = None

    @property
    def open_requests(self) -> int:
        """Requests that wait or run."""
        return sum(request.open for call in self._calls for request in call.requests)

    def submit(self, call: Call, most_waiting: int | None = None) -> None:
        """Takes a call, all or none of it; waits for nobody.

        Raises:
            QueueFull: More than ``most_waiting`` would wait for a slot, beside those that calls hold back.
            RuntimeError: The program ends.
        """
        if _PROGRAM_ENDED.is_set():
            raise RuntimeError("the program has ended")
        with self._mutex:
            if most_waiting is not None and call.plan is not None:
                served = sum(request.open for request in self._counted())
                check_room(served - call.plan.size.slots, len(call.queue), most_waiting)
            now = time.monotonic()
            for request in call.queue:
                request.arrival = request.arrival or now
            self._waiting.append(call)
        if self._thread is None and not call.in_callers_thread:
            # Of two that start at once one ends. An interrupt may strike here: the next call starts one.
            threading.Thread(target=self._run, name="jetspec-engine", daemon=True).start()

    def run(
        self,
        work: Callable[[], T],
        plan: EnginePlan | None = None,
        weights: DecodeWeights | None = None,
        config: tuple[Any, ...] | None = None,
    ) -> T:
        """Waits until something is done between two dispatches, while nobody else is served.

        Args:
            work: What to do.
            plan: The engine that is needed for it; None is any or none.
            weights: That engine's parameters.
            config: JAX's settings; None is those of this thread.

        Raises:
            Exception: Whatever the work raises.
        """
        call = Call(self, plan, weights, work=work, config=config or thread_config())
        try:
            self.submit(call)
            wait([call])  # which also raises what the work has raised
            while call.work is not None:
                wait([call])
        finally:
            call.work = None
        return call.result

    def launch(self) -> None:
        """Gives calls their engine and launches a batch, if they need any; not while one is in flight.

        Raises:
            Exception: Whatever is wrong with the engine.
        """
        if self.engine is not None and self.engine.broken:
            self._fail(RuntimeError(LOST))
        if self._in_flight or self._begin():
            return
        if self.engine is not None and self._served:
            self._wait_for_readers()
            self._admit(self.engine)
            if self.engine.busy:
                with configured(self._config):
                    self.engine.launch(self._most_rounds(self.engine))

    def collect(self) -> None:
        """Waits for the batch in flight, if any, and hands out its tokens.

        Raises:
            Exception: Whatever is wrong with the engine.
        """
        if self.engine is not None and self._in_flight:
            for call in self._served:
                call.ready.clear()
            with configured(self._config):
                self.engine.collect()
            if self.engine.record is not None:
                with self._mutex:
                    self.tally.add_dispatch(self.engine.record)
            self.failed = False

    def free(self) -> None:
        """Frees the engine, unless it serves somebody."""
        self.run(self._drop_idle)

    def stats(self, num_pages: int) -> EngineStats:
        """Figures by now; from any thread, which waits for nobody.

        Args:
            num_pages: Pages that there will be, once there is an engine that stands.
        """
        engine = self.engine
        with self._mutex:
            pool = engine.scheduler.pool if engine is not None and engine.plan.persistent else None
            return self.tally.stats(self._counted(), num_pages, pool)

    def settle(self) -> None:
        """Waits until the thread has ended, unless it serves somebody."""
        thread = self._thread
        while thread is not None and thread.is_alive() and not self.open_requests:
            thread.join(_MOMENT)

    def _run(self) -> None:
        with self._mutex:
            if self._thread is not None:
                return
            self._thread = threading.current_thread()
            _RUNNING.add(self)
        try:
            while self._has_work():
                try:
                    self.launch()
                    self.collect()
                except Exception as error:
                    self._fail(error)
        except BaseException as error:  # nobody may wait for a thread that is gone
            failed = EngineFailed(f"the engine's thread has ended: {error!r}")
            failed.__cause__ = error
            self._fail(failed, everyone=True)

    def _has_work(self) -> bool:
        if _PROGRAM_ENDED.is_set():
            self._fail(RuntimeError("the program has ended"), everyone=True)
        with self._mutex:
            self._forget()
            if not (self._waiting or self._served):
                self._end_thread()
            return self._thread is threading.current_thread()

    def _end_thread(self) -> None:
        if self.engine is not None:
            self.engine.scheduler.drop_closed()  # their errors hold frames of callers, and so the target
        self._thread = None
        _RUNNING.discard(self)

    def _forget(self) -> None:
        """Lets go of requests and calls that are over."""
        for call in self._served:
            for request in call.admitted:
                if not request.open:
                    self.tally.add_request(request)
            call.admitted = [request for request in call.admitted if request.open]
        self._served = [call for call in self._served if not call.over]
        self._waiting = deque(call for call in self._waiting if not call.over)

    def _begin(self) -> bool:
        """Lets the first calls in as long as the engine suits them; whether work was done instead."""
        with self._mutex:
            self._forget()
        while self._waiting:
            call = self._waiting[0]
            if not (call.over or self._suits(call)):
                if self._served:
                    return False  # nobody passes it
                try:
                    self._make(call)
                except Exception as error:
                    # An engine that is too large for another caller says nothing of a server's.
                    self.failed = self.failed or (call.plan is not None and call.plan.persistent)
                    call.fail(error)
            with self._mutex:
                if call.work is None and not call.over:
                    self._served.append(call)
                self._waiting.popleft()  # last: an interrupt of a caller that makes the steps loses no call
            if call.work is not None:
                self._do(call, call.work)
                return True
        return False

    def _suits(self, call: Call) -> bool:
        engine = self.engine
        if call.plan is None or engine is None or call.config != self._config:
            return call.plan is None
        joining = bool(self._served) or (engine.plan.persistent and self.server() is not None)
        return call.is_served_by(engine.plan, engine.weights, joining=joining)

    def _make(self, call: Call) -> None:
        self._drop_idle()  # its stores go before others are made
        self._config, server = call.config, self.server()
        if server is not None and call.is_served_by(server.plan, server.weights, joining=True):
            call = server
        with configured(self._config):
            self.engine = Engine(call.plan, call.weights)

    def _do(self, call: Call, work: Callable[[], Any]) -> None:
        try:
            with configured(call.config):
                call.result = work()
        except BaseException as error:
            call.error = error  # the caller's
        call.work = None
        call.news.set()

    def _wait_for_readers(self) -> None:
        """Gives callers a moment to find their stop strings, or the next batch would be for nothing."""
        for call in self._served:
            if call.most_admitted and any(request.params.stop for request in call.admitted if request.open):
                call.ready.wait(_MOMENT)

    def _admit(self, engine: Engine) -> None:
        """Admits requests of all calls, so many of each as it wants at a time."""
        for call in self._served:
            most = math.inf if call.most_admitted is None else min(call.most_admitted, engine.plan.size.slots)
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
            except IndexError:  # the loop of a copy has had the last one
                return None
            return call.admitted[-1]

    def _most_rounds(self, engine: Engine) -> int | None:
        if engine.plan.persistent:
            return None
        most = [call.most_rounds for call in self._served if call.most_rounds is not None]
        if engine.plan.size.slots > 1 and any(call.queue for call in self._served):
            most.append(ROUNDS_TO_AN_END)  # somebody waits, though not in the scheduler
        return min(most, default=None)

    def _fail(self, error: Exception, *, everyone: bool = False) -> None:
        """Ends the calls that the engine serves, or all, with an error; the next one makes an engine anew."""
        with self._mutex:
            self.failed = True
            failed, self._served = self._served, []
            engine, self.engine = self.engine, None
            if everyone:
                failed += self._waiting
                self._waiting.clear()
                self._end_thread()
        # What the devices cannot hold, those that follow are told as well, and go on.
        ends = self.has_workers and not isinstance(error, DeviceMemoryError)
        self.has_workers = self.has_workers and not ends  # before anybody comes again
        for call in failed:
            call.fail(error)
        with self._mutex:
            for request in [request for call in failed for request in call.admitted]:
                self.tally.add_request(request)
        if engine is not None:
            engine.close()
        if ends:
            send("end", f"{type(error).__name__}: {error}")

    def _drop_idle(self) -> None:
        if self.engine is not None and not self._served:
            engine, self.engine = self.engine, None
            engine.close()

    @property
    def _in_flight(self) -> bool:
        return self.engine is not None and self.engine.runner.in_flight is not None

    @property
    def _calls(self) -> list[Call]:
        return [*self._waiting, *self._served]

    def _counted(self) -> list[Request]:
        """Requests that wait or run, but for those that calls hold back."""
        counted = []
        for call in self._calls:
            counted += call.requests if call.most_admitted is None else call.admitted
        return counted


# The loops of targets; each goes with its target. Heads share it, as their engines do not coexist.
_LOOPS: "weakref.WeakKeyDictionary[Target, EngineLoop]" = weakref.WeakKeyDictionary()


def loop_for(target: Target) -> EngineLoop:
    """The loop of a target, whichever head drafts."""
    return _LOOPS.get(target) or _LOOPS.setdefault(target, EngineLoop(target.mesh))


def wait(calls: Sequence[Call]) -> None:
    """Waits for news of calls that share it; where callers make the steps, for the batch of the first.

    Raises:
        RuntimeError: This thread is that of a loop, which would wait for itself or for one that waits for it;
            or a fork has no such thread.
        Exception: An engine's error, or work's.
    """
    if threading.current_thread() in [loop._thread for loop in tuple(_RUNNING)]:
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
