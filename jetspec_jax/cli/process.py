"""The command as a process of its own, which an interrupt ends at once, whatever it is doing."""

import os
import queue
import signal
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


def run_interruptibly(
    main: Callable[[], int],
    message: str = "jetspec-jax: interrupted",
    tell: Callable[[], object] = lambda: None,
) -> int:
    """Runs a main program in a thread, and waits for it; an interrupt ends the process with code 130.

    Python looks for signals only between its own steps and in the main thread, which a compiler may keep for
    minutes; other libraries' callbacks swallow what is raised in them; and Python must not take itself down
    while a compiler runs. So the main thread waits, does what it is asked `in_main_thread`, and the process
    ends there and then.

    Args:
        main: Returns the exit code; what it raises is raised here.
        message: A line for standard error, said on an interrupt.
        tell: Called then, to tell other processes of it.
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
            tell()
        finally:  # also on a second interrupt
            os._exit(130)
    finally:
        _asked = None
