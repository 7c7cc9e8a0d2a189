"""Compiles programs in threads, and knows which programs exist and serve for others.

XLA lets go of the interpreter while it compiles, so the engine's thread decodes meanwhile. Tracing and
lowering hold it: one program at a time, and in turns with decoding.
"""

import logging
import math
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, as_completed

from jetspec_jax.engine.batch import PREFILL, Program, Shape
from jetspec_jax.progress import terminal_bar

#: Most threads that compile in the background, in all engines of the process: XLA uses several threads for a
#: large program itself, and each program that is compiled needs host memory, a gigabyte and more.
MOST_THREADS = 8
_AT_ONCE = threading.BoundedSemaphore(MOST_THREADS)
#: Dispatches in which a larger program replaces a wanted one, before that is compiled too. On a CPU a
#: compilation slows the rounds beside it.
REPLACED = 64
#: Set at the interpreter's exit, after which all threads of engines end soon.
PROGRAM_ENDED = threading.Event()
# Requests are decoded if a launch of rounds began within so many seconds: beside a thread that lowers, it may
# take as long. And seconds between two checks of that.
_DECODING, _LOOKS_EVERY = 1.0, 0.01
_log = logging.getLogger("jetspec_jax")


class EngineThread(threading.Thread):
    """A thread that `end_all` ends before the interpreter does: in compiled code it would abort the exit."""

    def __init__(self, work: Callable[[], None], name: str, end: Callable[[], object]):
        """A thread that has not started; ``end`` makes it end soon."""
        # A daemon: Python would wait for other threads before exit functions can end them.
        super().__init__(target=work, name=name, daemon=True)
        self.end = end


def in_engine_thread() -> bool:
    """Whether this is one of the threads."""
    return isinstance(threading.current_thread(), EngineThread)


def end_all() -> None:
    """Ends all threads of engines: waits for the programs that they compile, and for rounds in flight."""
    PROGRAM_ENDED.set()
    threads = [thread for thread in threading.enumerate() if isinstance(thread, EngineThread)]
    for thread in threads:
        thread.end()
    for thread in threads:
        if thread.is_alive():  # a fork has none of them
            thread.join()


class Tracing:
    """Entered to trace and lower a program.

    More threads at once would be no faster, and an engine's thread would wait for each of them. While rounds
    are launched, a turn is followed by a pause of the same length: a launch needs the interpreter dozens of
    times, and beside a thread that lowers it takes up to a second.
    """

    def __init__(self):
        #: Held while a program is traced and lowered, and in the pause after it.
        self.lock = threading.Lock()
        self._began, self._launched = 0.0, -math.inf

    def launched(self) -> None:
        """Called by an engine's thread when it launches a round."""
        self._launched = time.monotonic()

    def __enter__(self) -> None:
        self.lock.acquire()
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        try:
            ended = time.monotonic()
            pause = ended + (ended - self._began)
            while time.monotonic() < min(pause, self._launched + _DECODING):
                time.sleep(_LOOKS_EVERY)
        finally:
            self.lock.release()


#: Of all engines of the process, which share its interpreter.
TRACING = Tracing()


def default_threads() -> int:
    """Threads for an engine's programs: one per core of this process, at most `MOST_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


class Compiler:
    """Compiles programs: at once those that are needed now, and in threads those that are queued."""

    def __init__(self, compile: Callable[[Program], None], threads: int | None = None):
        """A compiler without programs; several threads at once call ``compile``.

        There are at most ``threads``, by default `default_threads`; with 0, callers compile, in order.
        """
        self._compile, self._most = compile, default_threads() if threads is None else threads
        # Protects the attributes below.
        self._lock = threading.RLock()
        self._queue: deque[Program] = deque()
        # Of all programs that were asked for; and those that are compiled.
        self._futures: dict[Program, Future[None]] = {}
        self._compiled: set[Program] = set()
        self._replaced: Counter[Program] = Counter()
        self._threads: set[threading.Thread] = set()
        self.awaited: set[str] = set()  # kinds of programs that a caller of `compile` waits for

    @property
    def left(self) -> int:
        """Number of programs that are not compiled yet."""
        with self._lock:
            return sum(not future.done() for future in self._futures.values())

    def add(self, programs: Iterable[Program]) -> None:
        """Queues programs that are not known yet, unless the interpreter ends."""
        with self._lock:
            new = [program for program in dict.fromkeys(programs) if program not in self._futures]
            self._futures |= {program: Future() for program in new}
            self._queue += new
            if PROGRAM_ENDED.is_set():
                self.stop()
            for _ in range(min(self._most, self.left) - len(self._threads)):
                thread = EngineThread(self._work, "jetspec-compiler", self.stop)
                thread.start()  # a thread that cannot start must not count as one
                self._threads.add(thread)

    def compile(self, programs: Collection[Program]) -> None:
        """Compiles programs now, before all queued ones; this thread compiles too. Raises as `wait`."""
        if not (missing := [program for program in programs if program not in self._compiled]):
            return
        with self._lock:
            for program in missing:
                if program in self._futures and self._futures[program].done():
                    del self._futures[program]  # tried again
            self.add(missing)
            ahead = [program for program in missing if program in self._queue]
            self._queue = deque([*ahead, *(each for each in self._queue if each not in ahead)])
        self.awaited = {program.kind for program in missing}
        try:
            while self._next(missing):
                pass
            self.wait(missing)
        finally:
            self.awaited = set()

    def wait(self, programs: Collection[Program] | None = None) -> None:
        """Waits until programs, by default all, are compiled, with a progress bar on a terminal.

        Raises the error of one of them, or RuntimeError if the compiler was stopped before.
        """
        with self._lock:
            futures = [self._futures[each] for each in (self._futures if programs is None else programs)]
        with terminal_bar(total=len(futures), desc="compiling", unit=" programs") as bar:
            while not self._most and self._next():
                bar.update()
            for _ in as_completed(futures):
                bar.update(int(self._most > 0))
        for future in futures:
            future.result()

    def stop(self) -> None:
        """Drops all programs but those that are being compiled, after which the threads end."""
        with self._lock:
            while self._queue:
                error = RuntimeError("the engine was closed before its programs were compiled")
                self._futures[self._queue.pop()].set_exception(error)

    def shape(self, kind: str, live: int, bucket: int, coming: int | None = None) -> Shape:
        """The shape of rounds to run for a wanted one.

        It is the smallest compiled one with enough live slots, and trees of the same size; the wanted one is
        queued once others have replaced it in `REPLACED` dispatches. While it is queued, or if it could not
        be compiled, larger trees serve too, and if there are none, smaller ones. If nothing serves, the
        wanted shape is compiled at once, for ``coming`` live slots if more requests are about to decode.
        """
        wanted = Program(kind, live, bucket)
        if wanted in self._compiled:
            return live, bucket
        with self._lock:
            queued = wanted in self._futures
            there = [each[1:] for each in self._compiled if each.kind == kind and each.slots >= live]
        serving = [shape for shape in there if shape[1] == bucket or (queued and shape[1] > bucket)]
        if serving:
            self._replaced[wanted] += 1
            if self._most and self._replaced[wanted] == REPLACED:
                self.add([wanted])
            return min(serving, key=lambda shape: (shape[0] * shape[1], shape))
        if queued and there:
            return min(there, key=lambda shape: (-shape[1], shape[0]))
        return coming or live, bucket

    def chunks(self, shapes: Sequence[Shape]) -> Sequence[Shape]:
        """The shapes of prefill forwards to choose from: those that are not queued, running or failed."""
        if len(self._futures) == len(self._compiled):  # in nearly every dispatch
            return shapes
        with self._lock:
            missing = self._futures.keys() - self._compiled
        return [shape for shape in shapes if Program(PREFILL, *shape) not in missing] or shapes

    def _work(self) -> None:
        going_on = True
        while going_on:
            with _AT_ONCE:
                going_on = self._next()

    def _next(self, among: Collection[Program] | None = None) -> bool:
        """Compiles the next program, of all or among some; False without one."""
        with self._lock:
            program = next((each for each in self._queue if among is None or each in among), None)
            if program is None:
                self._threads.discard(threading.current_thread())
                return False
            self._queue.remove(program)
            future = self._futures[program]
        try:
            self._compile(program)
        except Exception as error:
            _log.warning("%s was not compiled ahead: %s", program, error)
            future.set_exception(error.with_traceback(None))  # its frames keep arrays alive
        except BaseException:  # an interrupt of a caller that compiles
            with self._lock:
                del self._futures[program]
            future.set_exception(RuntimeError("the compilation was interrupted"))
            raise
        else:
            self._compiled.add(program)
            future.set_result(None)
        return True
