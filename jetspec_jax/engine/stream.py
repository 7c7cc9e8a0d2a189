"""A completion piece by piece, while it is decoded."""

import threading
from collections.abc import Iterator
from typing import Any

from jetspec_jax.device.processes import OutOfStep
from jetspec_jax.engine.loop import Call, wait
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

    def __init__(self, call: Call, request: Request, tokenizer: Any):
        """Submits a call of one request."""
        self.completion: Completion | None = None
        self._lock, self._closed = threading.RLock(), False
        self._output, self._sent = Output(request, tokenizer), 0
        self._call: Call | None = call
        request.on_update = call.news.set
        call.loop.submit(call)

    def __enter__(self) -> "Stream":
        """The stream itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the request."""
        self.close()

    def __next__(self) -> str:
        """The next piece of text, which is never empty.

        Raises:
            Exception: Whatever is wrong with the engine that decodes it.
        """
        sent = None
        try:
            with self._lock:  # directly: a generator that holds it outlives an interrupt
                while not self._closed:
                    text = self._settled()
                    if len(text) > self._sent:
                        sent, self._sent = self._sent, len(text)
                        return text[sent:]
                    if self.completion is not None:
                        break
                    self._wait()
        except BaseException:
            if sent is not None:
                self._sent = sent  # an interrupt on the way out: the piece is still to come
            raise
        raise StopIteration

    def _settled(self) -> str:
        """The text so far."""
        self._output.update()
        if self._output.finish_reason is not None and self.completion is None:
            self._leave()
            self.completion = self._output.completion()
        return self._output.settled_text

    def _wait(self) -> None:
        call, request = self._call, self._output.request
        if call is None:
            return  # closed by another thread just now
        try:
            wait([call])
        except OutOfStep:
            if not request.cancelled:
                raise
        if request.cancelled and request.finish_reason is None:
            self.close()  # the first process has

    def close(self) -> None:
        """Ends the request; its slot and pages are free again. Waits for nobody."""
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        call, self._call = self._call, None  # the engine is not kept by a stream that has ended
        self._output.request.cancel()
        if call is not None:
            call.news.set()
