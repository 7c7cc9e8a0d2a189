"""The command as a process of its own, which an interrupt ends at once, whatever it is doing."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

# What the main thread is to do for the program, and None when that has ended.
_Call = tuple[Callable[[], Any], Future[Any]]
_calls: "queue.SimpleQueue[_Call | None] | None" = None
_taker: Callable[[], bool] | None = None


def run_interruptibly(
    main: Callable[[], int],
    message: str = "jetspec-jax: interrupted",
    tell: Callable[[], object] = lambda: None,
) -> int:
    """Runs a main program in a thread, and waits for it; an interrupt ends the process with code 130.

    Python looks for signals only between its own steps and in the main thread, which a compiler may keep for
    minutes; other libraries' callbacks swallow what is raised in them; and Python must not take itself down
    while a compiler runs. So the main thread does nothing but wait, and the process ends there and then. A
    program that has a use for interrupts says so by `taking_interrupts`, or waits `in_main_thread`.

    Args:
        main: Returns the exit code; what it raises is raised here.
        message: A line for standard error, said on an interrupt.
        tell: Called then, to tell other processes of it.
    """
    global _calls
    outcome: Future[int] = Future()
    calls = _calls = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.set_result(main())
        except BaseException as error:
            outcome.set_exception(error)
        finally:
            calls.put(None)

    # Not waited for when Python ends, as other threads are: `outcome` is.
    thread = threading.Thread(target=work, name="jetspec-jax", daemon=True)
    try:
        thread.start()
        while not _served(calls):
            pass
        return outcome.result()
    except KeyboardInterrupt:
        try:
            os.write(2, f"\n{message}\n".encode())
            tell()
        finally:  # also on a second interrupt
            os._exit(130)
    finally:
        _calls = None


def _served(calls: "queue.SimpleQueue[_Call | None]") -> bool:
    """Does the next call, or gives an interrupt to who takes it; True once the program has ended."""
    try:
        call = calls.get()
        if call is None:
            return True
        function, answer = call
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)
    except KeyboardInterrupt:
        if _taker is None or not _taker():
            raise
    return False


@contextlib.contextmanager
def taking_interrupts(taker: Callable[[], bool]) -> Iterator[None]:
    """Has interrupts call a function while the block runs; a program in the main thread gets them raised.

    Args:
        taker: Called in the main thread, while the program goes on in its own; returns whether it goes on
            for good, or the process is to end.
    """
    global _taker
    _taker = taker
    try:
        yield
    finally:
        _taker = None


def in_main_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in the main thread, where an interrupt is raised in it, and so here.

    Only there an interrupted ``input`` leaves the terminal as it was.
    """
    if _calls is None:
        return function()
    answer: Future[Any] = Future()
    _calls.put((function, answer))
    return answer.result()
