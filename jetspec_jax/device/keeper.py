"""The engine that a target keeps: at most one, because its stores take much of a device's memory."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Keeper:
    """Holds at most one engine, for all calls that decode with one target; knows nothing of engines.

    Attributes:
        line: Held by who waits for the lock, and while a call has it. A thread may take it again.
        lock: Held while anything is done with the engine. A thread may take it again.
        engine: The engine; None if there is none.
        driver: Leads to the driver that serves with it whoever comes; None if there has been none.
    """

    line: Any = field(default_factory=threading.RLock)
    lock: Any = field(default_factory=threading.RLock)
    engine: Any = None
    driver: "weakref.ref[Any] | None" = None

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Holds the lock for one dispatch of a thread that makes one after the other.

        Who waits in the line meanwhile comes before its next turn; calls hold the line to their end. For
        threads that no interrupt strikes, which do not have the lock already.
        """
        with self.line:
            self.lock.acquire()
        try:
            yield
        finally:
            self.lock.release()
