"""The engine: a thread that owns slots and pages, and serves requests until it is closed."""

import atexit
import enum
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from jetspec_jax.decode.state import DecodeWeights
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine.batch import KINDS, Batch, Kind, Program
from jetspec_jax.engine.compiler import PROGRAM_ENDED, EngineThread, end_all, in_engine_thread
from jetspec_jax.engine.plan import EnginePlan, check_engine_memory, overlaps
from jetspec_jax.engine.policy import AutoBudget, FixedBudget
from jetspec_jax.engine.request import EngineFailed, Request
from jetspec_jax.engine.runner import Decode, Runner
from jetspec_jax.engine.scheduler import Scheduler, check_room
from jetspec_jax.engine.size import first_programs
from jetspec_jax.engine.stats import EngineStats, Tally
from jetspec_jax.engine.worker import Workers
from jetspec_jax.progress import log_once
from pallas_kernels.dispatch import gpu_problem

T = TypeVar("T")
#: Errors of requests whose engine was closed, and in a fork.
CLOSED = "this engine was closed; its requests are lost"
FORK = "this process is a fork, without the thread that serves this request"

_log = logging.getLogger("jetspec_jax")
# Engines with stores.
_SERVING: "weakref.WeakSet[Engine]" = weakref.WeakSet()
# JAX is already imported, so its own exit functions run after this one.
atexit.register(end_all)


class State(enum.Enum):
    """An engine's state."""

    STARTING = "has no stores yet"
    SERVING = "serves requests"
    CLOSED = "was closed, or has failed"


class EngineClosed(RuntimeError):
    """The engine is closed and takes no requests and no functions."""


class _Task(Generic[T]):
    """A function that the engine's thread runs, as soon as it is ``due``, and its result."""

    def __init__(self, function: Callable[[], T], due: Callable[[], bool]):
        self._function, self.due = function, due
        # A queue of the standard library's C code: an interrupt cannot leave it locked.
        self.results: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def run(self) -> None:
        try:
            self.results.put((self._function(), None))
        except BaseException as error:
            self.results.put((None, error))

    def wait(self) -> T:
        result, error = self.results.get()
        if error is not None:
            raise error
        return result


#: Requests, a function, or None: the engine's end.
_Commands = queue.SimpleQueue["list[Request] | _Task[Any] | None"]


class Engine:
    """A fixed number of slots over one page pool, and the thread that serves them.

    The thread starts with the first command, allocates the stores, and is the only one that uses them. It
    repeats: take commands, schedule a batch, send it to the other processes, launch it, and update the
    requests. On a GPU a batch may be launched while the one before is in flight: see `overlaps` and
    `Scheduler`. Text is handled in `jetspec_jax.engine.output`. While the thread is idle it holds no
    reference to the engine, so an engine that nobody holds is freed, and its thread ends. An error of a batch
    fails all requests and frees the stores; the engine is closed then.

    If several processes share the mesh, process 0 has the engine, and the others `follow` it.
    """

    def __init__(self, plan: EnginePlan, weights: DecodeWeights, *, overlapped: bool | None = None):
        """An engine without stores.

        If ``overlapped`` it launches single rounds, with two batches in flight, instead of loops; None
        chooses for the devices.
        """
        self.plan = plan
        self.state = State.STARTING
        #: Whether an error has closed it.
        self.failed = False
        self._weights, self._overlapped = weights, overlapped
        self._workers = Workers(plan.decoder.mesh)
        self._process = os.getpid()
        self._tally = Tally()
        # Protects `state` and the requests that have not ended; held briefly.
        self._lock = threading.Lock()
        self._requests: list[Request] = []
        self._tasks: list[_Task[Any]] = []
        self._commands: _Commands = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()  # held by the thread
        self._closing = False
        weakref.finalize(self, self._commands.put, None).atexit = False

    def submit(self, requests: Sequence[Request], most_waiting: int | None = None) -> None:
        """Queues requests, from any thread, without waiting.

        Raises QueueFull if more than ``most_waiting`` requests would wait for a slot, or EngineClosed.
        """
        with self._lock:
            self._check_open()
            if most_waiting is not None:
                check_room(self.open_requests - self.plan.size.slots, len(requests), most_waiting)
            now = time.monotonic()
            for request in requests:
                request.arrival = request.arrival or now
            self._requests += requests
            self._commands.put(list(requests))
            self._start()

    def run(self, function: Callable[[], T], due: Callable[[], bool] = lambda: True) -> T:
        """Runs a function in the engine's thread, with nothing in flight, and waits for its result.

        It runs once it is ``due``; until then requests are served. Raises EngineClosed, or its error.
        """
        self.check_can_wait()
        task = _Task(function, due)
        with self._lock:
            self._check_open()
            self._commands.put(task)
            self._start()
        return task.wait()

    def close(self) -> None:
        """Fails its requests, deletes the stores, and waits for the thread; may be called again."""
        self._closing = True
        if self.state is State.SERVING:
            self.runner.compiler.stop()
        with self._lock:
            thread = self._thread
            if thread is None:
                self.state = State.CLOSED
        self._commands.put(None)
        if thread is not None and not in_engine_thread() and os.getpid() == self._process:
            thread.join()

    def wake(self) -> None:
        """Lets an idle engine notice that a request was cancelled."""
        self._commands.put([])

    def check_can_wait(self) -> None:
        """Raises RuntimeError in an engine's thread, and in a fork, which has no such thread."""
        if in_engine_thread():
            raise RuntimeError("an engine calls this function, and cannot wait for one: use another thread")
        if os.getpid() != self._process:
            raise RuntimeError(FORK)

    @property
    def open_requests(self) -> int:
        """Number of waiting and running requests."""
        return sum(request.open for request in tuple(self._requests))

    @property
    def left(self) -> int:
        """Number of programs that are still compiled in the background."""
        return self.runner.compiler.left if self.state is State.SERVING else 0

    def compiling(self) -> set[str]:
        """Kinds of programs that requests wait for."""
        return self.runner.compiler.awaited if self.state is State.SERVING else set()

    def stats(self) -> EngineStats:
        """Statistics so far; from any thread, without waiting."""
        with self._lock:
            pool = self.scheduler.pool if self.state is State.SERVING else None
            counted = self._tally.stats(self._requests, self.plan.size.num_pages, pool)
        return counted + EngineStats(programs_left=self.left)

    def warm_up(
        self,
        kinds: Sequence[Kind],
        *,
        count: int | None = None,
        scores: bool = False,
        background: bool = False,
    ) -> None:
        """Compiles all prefill forwards, the rounds of some kinds, and ``scores`` of prompts.

        Requests are served meanwhile. The rounds are those of ``count`` requests that decode together; None
        is any number. In the ``background`` it returns as soon as any request without optional parts can be
        served; processes that share devices compile everything. Raises errors of engine and compiler.
        """
        programs = self.run(lambda: self.runner.programs(kinds, scores=scores))
        size, compiler = self.plan.size, self.runner.compiler
        if count is not None:
            live = size.live_for(min(count, size.slots))
            programs = [each for each in programs if each.slots == live or each.kind not in KINDS]
        if self._workers.there:  # all processes compile the same programs, in one order
            self.run(functools.partial(self._compile, programs))
        elif background:
            compiler.compile(first_programs(size, tuple(self.runner.decoders), Kind()))
            compiler.add(programs)
        else:
            compiler.add(programs)
            compiler.wait(programs)

    def trace(self, request: Request, decode: Decode) -> None:
        """Decodes one round of a traced request by a function; called by `run`. An error ends the engine."""
        try:
            batch = self.scheduler.next_batch(traced=request)
            if batch is not None:
                self.runner.launch(batch, decode)
                self._collect()
        except Exception as error:
            self._fail(error)
            raise

    def _compile(self, programs: Sequence[Program]) -> None:
        self._workers.send("compile", programs)
        self.runner.compiler.compile(programs)

    def _check_open(self) -> None:
        if PROGRAM_ENDED.is_set():
            raise RuntimeError("the program has ended")
        if os.getpid() != self._process:
            raise RuntimeError(FORK)
        if self.state is State.CLOSED:
            raise EngineClosed(CLOSED)

    def _start(self) -> None:
        """Starts the thread. If an interrupt occurs here, the next command starts another: see `_serve`."""
        if self._thread is None:
            work = functools.partial(_serve, weakref.ref(self), self._commands, self._turn)
            thread = EngineThread(work, "jetspec-engine", functools.partial(self._commands.put, None))
            thread.start()
            self._thread = thread

    # The rest runs in the engine's thread.

    def _run(self, command: "list[Request] | _Task[Any] | None") -> bool:
        """Serves until nothing is left to do; False if the engine is closed."""
        if isinstance(command, _Task):
            self._tasks.append(command)  # it fails too if the stores cannot be allocated
            command = []
        try:
            if command is not None and self.state is State.STARTING:
                self._open()
            self._take(command)
            while self._take_commands():
                while not self._due() and self.scheduler.has_room and (batch := self.scheduler.next_batch()):
                    self._launch(batch)
                if not self.runner.in_flight:
                    break
                self._collect()
        except Exception as error:
            self._fail(error)
        except BaseException as error:
            failed = EngineFailed(f"the engine's thread has ended: {error!r}")
            failed.__cause__ = error
            self._fail(failed)
        if self.state is State.SERVING:
            self.scheduler.drop_closed()  # their errors keep callers' frames alive, and so the engine
            self._count_ended()
        return self.state is State.SERVING

    def _open(self) -> None:
        """Allocates the stores; raises DeviceMemoryError if the device cannot hold them and a round."""
        plan = self.plan
        self._workers.send("open", plan.size)
        try:
            check_engine_memory(plan)
        except DeviceMemoryError as error:
            if not _SERVING:
                raise
            have = f"{len(_SERVING)} engines of this process have stores: close() an LLM that is not used"
            raise DeviceMemoryError(f"{error}\n{have}") from None
        overlapped = overlaps(plan) if self._overlapped is None else self._overlapped
        self.runner = Runner(plan, self._weights, overlapped=overlapped)
        auto, shapes = plan.auto, plan.size.rounds(tuple(self.runner.decoders))
        policy = (
            FixedBudget(shapes, overlapped=overlapped)
            if auto is None
            else AutoBudget(shapes, auto.probing, overlapped=overlapped)
        )
        self.scheduler = Scheduler(
            plan.size, policy, plan.round_tokens, self.runner.compiler, overlapped=overlapped
        )
        if plan.decoder.implementation is None and (problem := gpu_problem()):
            log_once(logging.WARNING, f"tree attention runs on XLA: {problem}")
        if not plan.size.shares_pages:
            text = "each slot has windows or states of its own, and this engine keeps no snapshots of them"
            text = f"{plan.decoder.target.model_type}: {text}, so requests share no beginnings"
            log_once(logging.INFO, text)
        self.state = State.SERVING
        _SERVING.add(self)

    def _take_commands(self) -> bool:
        """Takes all commands, without waiting; False if the engine is closed."""
        while not self._commands.empty():
            self._take(self._commands.get())
        while self.state is State.SERVING and not self.runner.in_flight and (task := self._due()):
            self._tasks.remove(task)
            task.run()
        return self.state is State.SERVING

    def _due(self) -> "_Task[Any] | None":
        return next((task for task in self._tasks if task.due()), None)

    def _take(self, command: "list[Request] | _Task[Any] | None") -> None:
        if command is None:
            self._fail(EngineClosed(CLOSED))
        elif isinstance(command, _Task):
            self._tasks.append(command)
        else:
            for request in command:
                try:
                    self.scheduler.add(request)
                except ValueError as error:
                    request.fail(error)
                    continue
                if request.scored is not None:
                    self._workers.send("score", request.scored)
                    request.set_prompt_logprobs(self.runner.score(request.scored))

    def _launch(self, batch: Batch) -> None:
        self._workers.send("batch", batch)
        self.runner.launch(batch, matchers=self.scheduler.matchers)

    def _collect(self) -> list[Request]:
        """Waits for the oldest batch in flight; returns the requests that it decoded."""
        result = self.runner.collect()
        served = self.scheduler.update(result)
        with self._lock:
            self._tally.add_dispatch(result, self.scheduler.idle_rounds)
        self._count_ended()
        for request in served:
            request.notify()
        return served

    def _count_ended(self) -> None:
        with self._lock:
            for request in self._requests:
                if not request.open:
                    self._tally.add_request(request)
            self._requests = [request for request in self._requests if request.open]

    def _fail(self, error: Exception) -> None:
        """Closes the engine: its requests and functions get the error, and the stores are deleted."""
        if self._closing:
            error = EngineClosed(CLOSED)
        elif PROGRAM_ENDED.is_set():
            error = EngineClosed("the program has ended")
        with self._lock:
            served, self.state = self.state is State.SERVING, State.CLOSED
            requests, tasks = self._requests, self._tasks
            while not self._commands.empty():
                command = self._commands.get()
                tasks += [command] if isinstance(command, _Task) else []
        self.failed = not isinstance(error, EngineClosed)
        if self.failed and not (requests or tasks):  # no caller learns of it
            _log.error("the engine failed between two calls", exc_info=error)
        for request in requests:
            if request.finish_reason is None:
                request.lost = True
                request.fail(error)
            else:  # it has ended in the batch that failed
                request.publish()
                request.notify()
        for task in tasks:
            task.results.put((None, error))
        self._tasks = []
        self._count_ended()
        if served:
            _SERVING.discard(self)
            self.runner.free()
            self._workers.send("free")


def _serve(engine_ref: "weakref.ref[Engine]", commands: _Commands, turn: threading.Lock) -> None:
    """The work of an engine's thread; of several that were started, one serves."""
    if not turn.acquire(blocking=False):
        return
    serving = True
    while serving:
        command, engine = commands.get(), engine_ref()
        if engine is None:
            return
        serving = engine._run(command)
        del command, engine  # while it waits, it keeps neither alive
