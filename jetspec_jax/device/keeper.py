"""The engine that a target keeps: at most one, because its stores take much of a device's memory."""

import threading
from dataclasses import dataclass, field
from typing import Any


@dataclass(eq=False)
class Keeper:
    """Holds at most one engine, for all calls that decode with one target; knows nothing of engines.

    Attributes:
        lock: Held while anything is done with the engine. A thread may take it again.
        engine: The engine; None if there is none.
    """

    lock: Any = field(default_factory=threading.RLock)
    engine: Any = None
