"""Threads of engines. They end before the interpreter does, as a thread in compiled code aborts its exit."""

import threading
from collections.abc import Callable

#: Set at the interpreter's exit, after which the threads end soon.
PROGRAM_ENDED = threading.Event()


class EngineThread(threading.Thread):
    """A thread that `end_all` ends, and waits for until it has freed all its objects, which may be arrays."""

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
