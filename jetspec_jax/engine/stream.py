"""A completion piece by piece, while it is decoded."""

import threading
from collections.abc import Iterator
from typing import Any

from jetspec_jax.checkpoint.loading import Target
from jetspec_jax.device.processes import OutOfStep
from jetspec_jax.engine.engine import LOST, Engine
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.request import Request

# Rounds between two pieces of a stream: text appears while it is accepted, and little overshoots a stop.
STREAM_ROUNDS = 2


class Stream(Iterator[str]):
    """Pieces of text as they are accepted; what overshoots the end is discarded.

    A stream that is closed, left as a context, or dropped before its end frees its slot. It may be iterated
    and closed from any thread. Of several processes the first decides: where it has closed its stream, those
    of the others end too.

    Attributes:
        completion: The whole completion once the stream has ended, None before.
    """

    def __init__(self, target: Target, engine: Engine | None, request: Request):
        """Queues the request; called under the keeper's lock. Without an engine it is not queued."""
        self.completion: Completion | None = None
        self._line, self._lock = target.keeper.line, target.keeper.lock
        self._engine, self._closed = engine, False
        self._output, self._sent = Output(request, target.tokenizer), 0
        if engine is not None:
            engine.admit(request)

    def __enter__(self) -> "Stream":
        """The stream itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the request."""
        self.close()

    def __next__(self) -> str:
        """The next piece of text, which is never empty.

        Raises:
            RuntimeError: An interrupt has broken the engine that decodes it.
        """
        sent = None
        try:
            with self._line, self._lock:  # directly: a generator that holds them outlives an interrupt
                while not self._closed:
                    text = self._settled()
                    if len(text) > self._sent:
                        sent, self._sent = self._sent, len(text)
                        return text[sent:]
                    if self.completion is not None:
                        break
                    self._step()
        except BaseException:
            if sent is not None:
                self._sent = sent  # an interrupt on the way out: the piece is still to come
            raise
        raise StopIteration

    def _settled(self) -> str:
        """The text so far. Others who decode with the same engine serve the stream too."""
        self._output.update()
        if self._output.finish_reason is not None and self.completion is None:
            self._leave()
            self.completion = self._output.completion()
        return self._output.settled_text

    def _step(self) -> None:
        engine, request = self._engine, self._output.request
        if engine is not None and not request.unwanted:
            try:
                engine.step(STREAM_ROUNDS)
            except OutOfStep:
                if not request.cancelled:
                    raise
            if request.cancelled and request.finish_reason is None:
                self.close()  # the first process has
        elif not self._closed:  # as another thread may do at any time
            raise RuntimeError(LOST)

    def close(self) -> None:
        """Ends the request; its slot and pages are free again. Waits for nobody."""
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        self._output.request.cancel()
        self._engine = None  # its stores are the target's to keep or to free


class DrivenStream(Stream):
    """A stream whose request a driver serves, among those of others."""

    def __init__(self, target: Target, driver: Any, request: Request):
        """Submits the request."""
        super().__init__(target, None, request)
        self._line = self._lock = threading.RLock()  # the driver holds those of the engine
        self._driver, self._news = driver, threading.Event()
        request.told = self._news.set
        driver.submit([request], guests=True)

    def _step(self) -> None:
        if not self._closed:
            self._news.wait()
            self._news.clear()

    def close(self) -> None:
        """Ends the request; its slot and pages are free again. Waits for nobody."""
        super().close()
        self._news.set()
