"""Threads of engines. They end before the interpreter does, as a thread in compiled code aborts its exit."""

import threading
from collections.abc import Callable

#: Set at the interpreter's exit, after which the threads end soon.
PROGRAM_ENDED = threading.Event()


class EngineThread(threading.Thread):
    """A thread that `join_threads` waits for until it has freed all its objects, which may be arrays."""

    def __init__(self, work: Callable[[], None], name: str):
        """A thread that has not started."""
        # A daemon: Python would wait for other threads before exit functions can end them.
        super().__init__(target=work, name=name, daemon=True)


def in_engine_thread() -> bool:
    """Whether this is one of the threads."""
    return isinstance(threading.current_thread(), EngineThread)


def join_threads() -> None:
    """Waits until all threads have ended; a fork has none."""
    for thread in threading.enumerate():
        if isinstance(thread, EngineThread) and thread.is_alive():
            thread.join()
