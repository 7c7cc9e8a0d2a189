"""Compiles programs ahead of time, in threads, and knows which programs exist and serve for others.

XLA lets go of the interpreter while it compiles, so the engine's thread decodes meanwhile.
"""

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from tqdm import tqdm

from jetspec_jax.engine.programs import PREFILL, Program
from jetspec_jax.engine.threads import PROGRAM_ENDED, EngineThread, join_threads
from jetspec_jax.progress import unseen

#: Most threads that compile at the same time, in all engines of the process: XLA uses several threads for a
#: large program itself, and each program that is compiled needs host memory, a gigabyte and more.
MOST_THREADS = 8
_AT_ONCE = threading.BoundedSemaphore(MOST_THREADS)
# A fork has none of these.
_COMPILERS: "weakref.WeakSet[Compiler]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_COMPILERS.clear)
_log = logging.getLogger("jetspec_jax")


def end_all() -> None:
    """Ends all threads of engines: waits for the programs that they compile, and for rounds in flight."""
    PROGRAM_ENDED.set()
    for compiler in tuple(_COMPILERS):
        compiler.stop()
    join_threads()


def default_threads() -> int:
    """Threads for an engine's programs: one per core of this process, at most `MOST_THREADS`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MOST_THREADS)


class Compiler:
    """Compiles programs in the order in which they were added.

    Example::

        compiler.add([first, second])
        compiler.wait([first])  # the second one is compiled in the background
    """

    def __init__(self, compile: Callable[[Program], None], threads: int | None = None):
        """A compiler without programs; several threads at once call ``compile``.

        There are at most ``threads``, by default `default_threads`; with 0, `wait` compiles, in order.
        """
        self._compile, self._most = compile, default_threads() if threads is None else threads
        #: Whether `shape` queues wanted programs that larger ones replace.
        self.ahead = False
        # Protects the attributes below.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[Program] = deque()
        self._running: set[Program] = set()
        self._compiled: set[Program] = set()
        self._errors: dict[Program, Exception] = {}
        # Running programs whose arguments got other shapes meanwhile.
        self._outdated: set[Program] = set()
        self._threads: set[threading.Thread] = set()
        # When programs were added to an empty queue, and the number compiled since then.
        self._since, self._count = 0.0, 0
        _COMPILERS.add(self)

    @property
    def left(self) -> int:
        """Number of programs that are not compiled yet."""
        return len(self._queue) + len(self._running)

    @property
    def failed(self) -> bool:
        """Whether a program could not be compiled ahead."""
        return bool(self._errors)

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
            known = {*self._queue, *self._running, *self._compiled, *self._errors}
            new = [program for program in programs if program not in known and not PROGRAM_ENDED.is_set()]
            if not self.left:
                self._since, self._count = time.monotonic(), 0
            self._queue += new
            starting = min(self._most, self.left) - len(self._threads)
            for _ in range(starting):
                thread = EngineThread(self._work, "jetspec-compiler")
                thread.start()  # a thread that cannot start must not count as one
                self._threads.add(thread)

    def compile(self, programs: Sequence[Program]) -> None:
        """Compiles programs now, unless they are compiled already; raises as `wait`."""
        if not self._compiled.issuperset(programs):
            self.add(programs)
            self.wait(programs)

    def forget(self, kinds: Collection[str]) -> None:
        """Forgets programs of some kinds, whose arguments have other shapes from now on.

        With `ahead` they are compiled again.
        """
        with self._changed:
            forgotten = [program for program in self._compiled if program.kind in kinds]
            self._compiled.difference_update(forgotten)
            self._outdated.update(program for program in self._running if program.kind in kinds)
            if self.ahead:
                self.add(forgotten)

    def wait(self, programs: Sequence[Program] | None = None) -> None:
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

    def claim(self, program: Program) -> None:
        """Leaves a program to the caller, who calls it next; waits for it if a thread compiles it now."""
        with self._changed:
            if program in self._queue:
                self._queue.remove(program)
            while program in self._running:
                self._changed.wait()
            self._compiled.add(program)

    def stop(self) -> None:
        """Drops all programs but those that are being compiled, after which the threads end."""
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()

    def shape(self, kind: str, live: int, bucket: int) -> tuple[int, int]:
        """The shape of rounds to run: the wanted one, or a larger one that exists before it is compiled.

        If the wanted one is queued, larger trees or even smaller ones serve until it is compiled. Else only
        a program of more live slots with trees of the same size replaces it. A program that could not be
        compiled ahead is compiled when it is needed, unless a larger one exists.

        Returns:
            Live slots and nodes. Of the compiled shapes the one with the fewest rows that has as many of
            both; if there is none, the one with the largest trees. If no round of this kind is compiled, but
            some are queued, one of all slots, plain or with the largest trees, which then replaces most
            others.
        """
        wanted = Program(kind, live, bucket)
        if wanted in self._compiled:
            return live, bucket
        with self._changed:
            there = [each[1:] for each in self._compiled if each.kind == kind and each.slots >= live]
            queued = [each[1:] for each in (*self._running, *self._queue) if each.kind == kind]
        if wanted in self._errors:
            larger = [shape for shape in there if shape[1] >= bucket]
            return min(larger, key=lambda shape: (shape[0] * shape[1], shape), default=(live, bucket))
        if wanted[1:] not in queued:
            larger = min((shape for shape in there if shape[1] == bucket), default=None)
            if larger is not None and self.ahead:
                self.add([wanted])
            return larger or (live, bucket)
        if larger := [shape for shape in there if shape[1] >= bucket]:
            return min(larger, key=lambda shape: (shape[0] * shape[1], shape))
        if there:
            return min(there, key=lambda shape: (-shape[1], shape[0]))
        slots = max(queued)[0]
        trees = [nodes for count, nodes in queued if count == slots]
        return slots, min(trees) if bucket == 1 else max(trees)

    def chunks(self, shapes: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """The shapes of prefill forwards to choose from: those that are compiled; all if none is."""
        if not self.left:
            return shapes
        with self._changed:
            missing = {*self._queue, *self._running}
        return [shape for shape in shapes if Program(PREFILL, *shape) not in missing] or shapes

    def _pending(self, programs: Iterable[Program]) -> list[Program]:
        with self._changed:
            left = {*self._queue, *self._running}
        return [program for program in programs if program in left]

    def _work(self) -> None:
        going_on = True
        while going_on:
            with _AT_ONCE:
                going_on = self._next()

    def _next(self) -> bool:
        """Compiles the next program; without one, this thread is no longer one of the compiler's."""
        with self._changed:
            if not self._queue:
                self._threads.discard(threading.current_thread())
                return False
            self._running.add(program := self._queue[0])  # first: `left` is read without the lock
            self._queue.popleft()
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
            if error is not None:
                self._errors[program] = error
            elif program in self._outdated:
                self._queue.append(program)
            else:
                self._compiled.add(program)
            self._outdated.discard(program)
            self._changed.notify_all()
        return True
