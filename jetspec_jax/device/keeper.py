"""The engine that a target keeps: at most one, because its stores take much of a device's memory."""

import contextlib
import os
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
        driver: Leads to the driver that serves with it whoever comes; None if there has been none.
        process: The id of the process that loaded the target.
    """

    line: Any = field(default_factory=threading.RLock)
    lock: Any = field(default_factory=threading.RLock)
    driver: "weakref.ref[Any] | None" = None
    process: int = field(default_factory=os.getpid)
    _kept: dict[str, Any] = field(default_factory=dict, init=False)

    @property
    def engine(self) -> Any:
        """The engine; None if there is none, or the next one is being made."""
        return self._kept.get("engine")

    @engine.setter
    def engine(self, engine: Any) -> None:
        self._kept["engine"] = engine

    def check_process(self) -> None:
        """Raises RuntimeError in a fork of the process that loaded the target, where JAX would hang."""
        if (own := os.getpid()) != self.process:
            raise RuntimeError(
                f"process {own} is a fork of process {self.process}, which loaded the models, and cannot use "
                'them: start processes by multiprocessing.get_context("spawn"), and load the models in each'
            )

    def take(self) -> None:
        """Keeps the engine no more: another one may be offered."""
        self._kept.pop("engine", None)

    def offer(self, engine: Any) -> bool:
        """Keeps an engine if there is none, and none is being made; whether it is kept.

        Needs no lock, so that a finaliser can call it, and is one step of the interpreter, so that no
        interrupt leaves it half done.
        """
        return self._kept.setdefault("engine", engine) is engine

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
