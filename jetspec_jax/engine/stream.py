"""Streams a completion while it is decoded."""

import functools
import threading
from collections.abc import Iterator
from typing import Any

from jetspec_jax.engine.call import Call
from jetspec_jax.engine.loop import wait
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.worker import SharedRequest


class Stream(Iterator[str]):
    """Pieces of text as they are accepted; tokens after the end are discarded.

    A stream that is closed, left as a context, or dropped before its end frees its slot. It may be iterated
    and closed from any thread. If several processes share the models, closing the stream in process 0 ends it
    in all of them.

    Attributes:
        completion: The whole completion once the stream has ended, None before.
    """

    def __init__(self, call: Call, request: Request, tokenizer: Any):
        """Submits a call of one request; if several processes share the models, its first step does so."""
        self.completion: Completion | None = None
        self._lock, self._closed = threading.RLock(), False
        self._output, self._text, self._sent = Output(request, tokenizer), "", 0
        self._call: Call | None = call
        self._shared = SharedRequest(call.loop.mesh, request)
        request.on_update = call.news.set
        self._submitted = not self._shared.shared
        if self._submitted:
            call.loop.submit(call)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> str:
        """The next piece of text, never empty.

        Raises:
            Exception: An error of the engine.
        """
        sent = None
        try:
            with self._lock:  # not in a generator, which would keep it locked after an interrupt
                while not self._closed:
                    if self.completion is not None:
                        self._leave()
                    if len(self._text) > self._sent:
                        sent, self._sent = self._sent, len(self._text)
                        return self._text[sent:]
                    if self.completion is not None:
                        break
                    self._step()
        except BaseException:
            if sent is not None:
                self._sent = sent  # interrupted before the return: the piece is returned later
            raise
        raise StopIteration

    def _step(self) -> None:
        call = self._call
        if call is None:
            return  # closed by another thread just now
        found = self._shared.run(call, functools.partial(self._advance, call))
        if found is None:
            self.close()  # process 0 has closed its stream
        else:
            self._text, self.completion = self._text + found[0], found[1]

    def _advance(self, call: Call) -> tuple[str, Completion | None]:
        """New text, and the completion if it has ended; waits for a step if there is neither."""
        if not self._submitted:
            call.loop.submit(call)
            self._submitted = True
        output, known = self._output, len(self._text)
        output.update()
        if output.finish_reason is None and len(output.settled_text) == known:
            wait([call])
            output.update()
        return output.settled_text[known:], None if output.finish_reason is None else output.completion()

    def close(self) -> None:
        """Ends the request, whose slot and pages are freed; does not wait."""
        self._closed = True
        self._leave()

    def _leave(self) -> None:
        call, self._call = self._call, None  # an ended stream keeps no engine
        if call is not None:
            self._output.request.cancel()
            call.news.set()
