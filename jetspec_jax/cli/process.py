"""Runs the command as a process that an interrupt ends at once."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# Functions to call in the main thread, which waits for them; None ends the wait. Without a command it is
# None.
_calls: "queue.SimpleQueue[Callable[[], object] | None] | None" = None


def in_main_thread(function: Callable[[], Any]) -> Any:
    """Calls a function in the main thread; returns its result, or raises its error, also an interrupt.

    Only in the main thread an interrupted ``input`` restores the terminal.
    """
    if _calls is None:
        return function()
    answer: Future[Any] = Future()

    def call() -> None:
        try:
            result = function()
        except BaseException as error:
            answer.set_exception(error)
        else:  # a later interrupt is not the function's
            answer.set_result(result)

    _calls.put(call)
    return answer.result()


def on_signals(handler: Callable[[int], object], *signals: signal.Signals) -> None:
    """Handles signals, if the command runs as a process of its own.

    The handler is called in the main thread and must be quick. If it raises KeyboardInterrupt, the process
    ends as on an interrupt. The default signals are SIGINT and SIGTERM.
    """

    def install() -> None:
        for number in signals or (signal.SIGINT, signal.SIGTERM):
            # A signal that the process was started with as ignored stays ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda received, _: handler(received))

    if _calls is not None:
        in_main_thread(install)


def run_program(main: Callable[[], int], message: str = "jetspec-jax: interrupted") -> int:
    """Like `run_interruptibly`; an interrupt after the program's end also has code 130.

    Must be the last call of a process: Python no longer raises interrupts afterwards.
    """
    try:
        return run_interruptibly(main, message)
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def run_interruptibly(main: Callable[[], int], message: str = "jetspec-jax: interrupted") -> int:
    """Runs a main program in a thread, and waits for it; an interrupt ends the process with code 130.

    Other processes that share the work are notified.

    Python handles signals only in the main thread and between bytecodes, and a compiler may block the main
    thread for minutes. Callbacks of other libraries swallow exceptions. And Python must not shut down while a
    compiler runs. So the main thread only waits and makes the calls of `in_main_thread`, and an interrupt
    ends the process without a shutdown.
    """
    global _calls
    outcome: Future[int] = Future()
    _calls = calls = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.set_result(main())
        except BaseException as error:
            outcome.set_exception(error)
        calls.put(None)

    try:
        # A daemon: after an interrupt nothing waits for it.
        thread = threading.Thread(target=work, name="jetspec-jax", daemon=True)
        thread.start()
        while (call := calls.get()) is not None:
            call()
        thread.join()  # it may still free arrays, which must not meet the interpreter's end
        return outcome.result()
    except KeyboardInterrupt:
        try:
            os.write(2, f"\n{message}\n".encode())
            _notify_others()
        finally:  # also on a second interrupt
            os._exit(130)
    finally:
        _calls = None


def _notify_others() -> None:
    # Without an import: the working thread may hold the import lock.
    joining = sys.modules.get("jetspec_jax.device.joining")
    if (notify := getattr(joining, "tell_of_interrupt", None)) is not None:
        notify()
