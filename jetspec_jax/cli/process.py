"""The command as a process of its own, which an interrupt ends at once, whatever it is doing."""

import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# What the main thread is asked to do while it waits; None ends its waiting. None without a command.
_asked: "queue.SimpleQueue[Callable[[], object] | None] | None" = None


def in_main_thread(function: Callable[[], Any]) -> Any:
    """What a function returns in the main thread; what it raises there, as on an interrupt, is raised here.

    Only there an interrupted ``input`` leaves the terminal as it was.
    """
    if _asked is None:
        return function()
    answer: Future[Any] = Future()

    def answered() -> None:
        try:
            result = function()
        except BaseException as error:
            answer.set_exception(error)
        else:  # an interrupt from here on is not the function's
            answer.set_result(result)

    _asked.put(answered)
    return answer.result()


def hear(told: Callable[[int], object], *signals: signal.Signals) -> None:
    """Has a command hear of signals itself, where it runs in a process of its own.

    Args:
        told: Called in the main thread with the signal's number; must be quick. A KeyboardInterrupt that it
            raises is one.
        *signals: Which; interrupts and SIGTERM if none is named.
    """

    def install() -> None:
        for number in signals or (signal.SIGINT, signal.SIGTERM):
            # Who was started with a signal ignored goes on so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda own, _: told(own))

    if _asked is not None:
        in_main_thread(install)


def run_program(main: Callable[[], int], message: str = "jetspec-jax: interrupted") -> int:
    """Runs a main program as `run_interruptibly` does; also from its end on an interrupt has code 130.

    For the last call of a process: Python no longer raises interrupts afterwards.
    """
    try:
        return run_interruptibly(main, message)
    finally:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, lambda *_: os._exit(130))


def run_interruptibly(main: Callable[[], int], message: str = "jetspec-jax: interrupted") -> int:
    """Runs a main program in a thread, and waits for it; an interrupt ends the process with code 130.

    Other processes that share the work are told of it.

    Python looks for signals only between its own steps and in the main thread, which a compiler may keep for
    minutes; other libraries' callbacks swallow what is raised in them; and Python must not take itself down
    while a compiler runs. So the main thread waits, does what it is asked `in_main_thread`, and the process
    ends there and then.

    Args:
        main: Returns the exit code; what it raises is raised here.
        message: A line for standard error, said on an interrupt.
    """
    global _asked
    outcome: Future[int] = Future()
    _asked = asked = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.set_result(main())
        except BaseException as error:
            outcome.set_exception(error)
        asked.put(None)

    try:
        # Not waited for when Python ends, as other threads are: `outcome` is.
        threading.Thread(target=work, name="jetspec-jax", daemon=True).start()
        while (wanted := asked.get()) is not None:
            wanted()
        return outcome.result()
    except KeyboardInterrupt:
        try:
            os.write(2, f"\n{message}\n".encode())
            _tell_others()
        finally:  # also on a second interrupt
            os._exit(130)
    finally:
        _asked = None


def _tell_others() -> None:
    # Nothing is imported here: the thread that works may be importing it.
    joining = sys.modules.get("jetspec_jax.device.joining")
    if (tell := getattr(joining, "tell_of_interrupt", None)) is not None:
        tell()
