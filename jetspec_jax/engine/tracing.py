"""Tracing and lowering hold the interpreter: one program at a time, and in turns with decoding."""

import math
import threading
import time

# Rounds follow each other at shorter intervals, in seconds, while requests are decoded on a GPU.
_DECODING = 0.1
# Between two looks at whether requests are still decoded.
_LOOKS_EVERY = 0.01


class Tracing:
    """Entered to trace and lower a program.

    More threads at once would be no faster, and an engine's thread would wait for each of them. While rounds
    are launched, a turn is followed by a pause of the same length: a launch needs the interpreter dozens of
    times, and beside a thread that lowers it takes up to a second.
    """

    def __init__(self):
        #: Held while a program is traced and lowered, and in the pause after it.
        self.lock = threading.Lock()
        self._began, self._launched = 0.0, -math.inf

    def launched(self) -> None:
        """Called by an engine's thread when it launches a round."""
        self._launched = time.monotonic()

    def __enter__(self) -> None:
        self.lock.acquire()
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        try:
            ended = time.monotonic()
            pause = ended + (ended - self._began)
            while time.monotonic() < min(pause, self._launched + _DECODING):
                time.sleep(_LOOKS_EVERY)
        finally:
            self.lock.release()


#: Of all engines of the process, which share its interpreter.
TRACING = Tracing()
