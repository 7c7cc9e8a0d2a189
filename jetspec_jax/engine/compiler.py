"""Compiles programs in threads, and knows which programs exist and serve for others.

XLA lets go of the interpreter while it compiles, so the engine's thread decodes meanwhile.
"""

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence

from tqdm import tqdm

from jetspec_jax.engine.programs import PREFILL, Program
from jetspec_jax.engine.threads import PROGRAM_ENDED, EngineThread
from jetspec_jax.progress import unseen

#: Most threads that compile at the same time, in all engines of the process: XLA uses several threads for a
#: large program itself, and each program that is compiled needs host memory, a gigabyte and more.
MOST_THREADS = 8
_AT_ONCE = threading.BoundedSemaphore(MOST_THREADS)
#: Dispatches in which a larger program replaces a wanted one, before that is compiled too.
REPLACED = 8
_log = logging.getLogger("jetspec_jax")


def default_threads() -> int:
    """Threads for an engine's programs: one per core of this process, at most `MOST_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


class Compiler:
    """Compiles programs: at once those that are needed now, and in threads those that are queued.

    Example::

        compiler.add([first, second])
        compiler.compile([second])  # before the first one
    """

    def __init__(self, compile: Callable[[Program], None], threads: int | None = None):
        """A compiler without programs; several threads at once call ``compile``.

        There are at most ``threads``, by default `default_threads`; with 0, callers compile, in order.
        """
        self._compile, self._most = compile, default_threads() if threads is None else threads
        # Protects the attributes below.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[Program] = deque()
        self._running: set[Program] = set()
        self._compiled: set[Program] = set()
        self._errors: dict[Program, Exception] = {}
        self._replaced: Counter[Program] = Counter()
        self._threads: set[threading.Thread] = set()
        # When programs were added to an empty queue, and the number compiled since then.
        self._since, self._count = 0.0, 0

    @property
    def left(self) -> int:
        """Number of programs that are not compiled yet."""
        return len(self._queue) + len(self._running)

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until all programs are compiled; None before the first one is."""
        with self._changed:
            if not self.left:
                return 0.0
            return (time.monotonic() - self._since) / self._count * self.left if self._count else None

    def add(self, programs: Iterable[Program]) -> None:
        """Queues programs, unless they are compiled already, or the interpreter ends."""
        with self._changed:
            self._add(programs)
            starting = min(self._most, self.left) - len(self._threads)
            for _ in range(starting):
                thread = EngineThread(self._work, "jetspec-compiler", self.stop)
                thread.start()  # a thread that cannot start must not count as one
                self._threads.add(thread)

    def compile(self, programs: Collection[Program]) -> None:
        """Compiles programs now, before all queued ones; this thread compiles too.

        Raises:
            Exception: As `wait`.
        """
        with self._changed:
            new = [program for program in programs if program not in self._compiled]
            if not new:
                return
            for program in new:
                self._errors.pop(program, None)  # tried again
                if program in self._queue:
                    self._queue.remove(program)
            before = list(self._queue)
            self._queue.clear()
            self.add(new) if self._most and len(new) > 1 else self._add(new)
            self._queue += before
        while self._next(new):
            pass
        self.wait(new)

    def wait(self, programs: Collection[Program] | None = None) -> None:
        """Waits until programs, by default all, are compiled, with a progress bar on a terminal.

        Raises:
            RuntimeError: The compiler was stopped before.
            Exception: The error of one of them.
        """
        with self._changed:
            every = *self._errors, *self._running, *self._queue
            mine = list(every if programs is None else programs)
        with tqdm(
            total=len(mine), desc="compiling", unit=" programs", delay=2, disable=unseen(), leave=False
        ) as bar:
            while left := self._pending(mine):
                if self._most:
                    with self._changed:
                        self._changed.wait_for(lambda left=left: self._pending(mine) != left)
                else:
                    self._next()
                bar.update(len(mine) - len(self._pending(mine)) - bar.n)
        for program in mine:
            if program in self._errors:
                raise self._errors[program]
            if program not in self._compiled:
                raise RuntimeError("the engine was closed before its programs were compiled")

    def stop(self) -> None:
        """Drops all programs but those that are being compiled, after which the threads end."""
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()

    def shape(self, kind: str, live: int, bucket: int, coming: int | None = None) -> tuple[int, int]:
        """The shape of rounds to run for a wanted one.

        It is the smallest compiled one with as many live slots, and trees of the same size; the wanted one is
        queued once others have replaced it in `REPLACED` dispatches. While it is queued, or if it could not
        be compiled, larger trees serve too, and if there are none, smaller ones. If nothing serves, the
        wanted shape is compiled at once, for ``coming`` live slots if more requests are about to decode.
        """
        wanted = Program(kind, live, bucket)
        if wanted in self._compiled:
            return live, bucket
        with self._changed:
            queued = wanted in (*self._running, *self._queue, *self._errors)
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

    def chunks(self, shapes: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """The shapes of prefill forwards to choose from: those that are compiled; all if none is."""
        if not self.left:
            return shapes
        with self._changed:
            missing = {*self._queue, *self._running}
        return [shape for shape in shapes if Program(PREFILL, *shape) not in missing] or shapes

    def _add(self, programs: Iterable[Program]) -> None:
        known = {*self._queue, *self._running, *self._compiled, *self._errors}
        if not self.left:
            self._since, self._count = time.monotonic(), 0
        self._queue += [each for each in programs if each not in known and not PROGRAM_ENDED.is_set()]

    def _pending(self, programs: Iterable[Program]) -> list[Program]:
        with self._changed:
            left = {*self._queue, *self._running}
        return [program for program in programs if program in left]

    def _work(self) -> None:
        going_on = True
        while going_on:
            with _AT_ONCE:
                going_on = self._next()

    def _next(self, among: Collection[Program] | None = None) -> bool:
        """Compiles the next program, of all or among some; False without one."""
        with self._changed:
            program = next((each for each in self._queue if among is None or each in among), None)
            if program is None:
                self._threads.discard(threading.current_thread())
                return False
            self._running.add(program)  # first: `left` is read without the lock
            self._queue.remove(program)
        error = None
        try:
            self._compile(program)
        except Exception as raised:
            _log.warning("%s was not compiled ahead: %s", program, raised)
            error = raised.with_traceback(None)  # its frames keep arrays alive
        except BaseException:  # an interrupt of a caller that compiles
            with self._changed:
                self._running.discard(program)
                self._changed.notify_all()
            raise
        with self._changed:
            self._running.discard(program)
            self._count += 1
            if error is None:
                self._compiled.add(program)
            else:
                self._errors[program] = error
            self._changed.notify_all()
        return True
