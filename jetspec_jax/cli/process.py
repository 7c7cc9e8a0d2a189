"""The command as a process of its own, which an interrupt ends at once, whatever it is doing."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future


def run_interruptibly(
    main: Callable[[], int],
    message: str = "jetspec-jax: interrupted",
    tell: Callable[[], object] = lambda: None,
) -> int:
    """Runs a main program in a thread, and waits for it; an interrupt ends the process with code 130.

    Python looks for signals only between its own steps and in the main thread, which a compiler may keep for
    minutes; other libraries' callbacks swallow what is raised in them; and Python must not take itself down
    while a compiler runs. So the main thread does nothing but wait, and the process ends there and then.

    Args:
        main: Returns the exit code; what it raises is raised here.
        message: A line for standard error, said on an interrupt.
        tell: Called then, to tell other processes of it.
    """
    outcome: Future[int] = Future()

    def work() -> None:
        try:
            outcome.set_result(main())
        except BaseException as error:
            outcome.set_exception(error)

    try:
        # Not waited for when Python ends, as other threads are: `outcome` is.
        threading.Thread(target=work, name="jetspec-jax", daemon=True).start()
        return outcome.result()
    except KeyboardInterrupt:
        try:
            os.write(2, f"\n{message}\n".encode())
            tell()
        finally:  # also on a second interrupt
            os._exit(130)
