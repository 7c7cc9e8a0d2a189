"""Waits for requests: completes several of them, or streams one, in the caller's thread."""

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tqdm import tqdm

from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.engines import Engines
from jetspec_jax.engine.output import Completion, Output
from jetspec_jax.engine.request import Request
from jetspec_jax.progress import unseen


class Bar(tqdm):
    """A bar on terminals with a separate lock: an interrupt may leave tqdm's held, and others waiting."""

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **{"disable": unseen(), **settings})


Bar.set_lock(threading.RLock())
#: A progress bar on a terminal, for long calls.
BAR = functools.partial(Bar, delay=2, miniters=0, leave=False)


def complete(
    engines: Engines,
    requests: Sequence[Request],
    tokenizer: Any,
    bar: Callable[..., Any] | None = BAR,
) -> list[Completion]:
    """Serves requests to their ends. The ``bar`` is called like tqdm; None is no bar.

    Raises:
        Exception: An error of a request, or of the engine; the other requests are cancelled.
    """
    running = {request: Output(request, tokenizer) for request in requests}
    outputs, news = list(running.values()), queue.SimpleQueue[Request]()
    for request in requests:
        request.on_update = functools.partial(news.put, request)
    progress, tokens = None if bar is None else bar(total=len(requests), unit=" completions"), 0
    try:
        for engine in set(engines.submit(requests)):
            engine.check_can_wait()
        while running:
            request = news.get()
            if (output := running.get(request)) is None:
                continue
            tokens -= len(output.token_ids)
            output.update()
            tokens += len(output.token_ids)
            if isinstance(progress, Bar):  # shows progress of a single long completion
                progress.set_postfix_str(f"{tokens} tokens", refresh=False)
            if output.finish_reason is not None:
                request.cancel()  # engines do not know stop strings
                del running[request]
            if progress is not None:
                progress.update(int(request not in running))
    finally:
        for request in requests:  # after an error, nobody waits for the others
            request.cancel()
        if progress is not None:
            progress.close()
    return [output.completion() for output in outputs]


class Stream(Iterator[str]):
    """Pieces of text as they are accepted; tokens after the end are discarded.

    A stream that is closed, interrupted, left as a context, or dropped before its end frees its slot. It may
    be iterated and closed from any thread.

    Attributes:
        completion: The whole completion once the stream has ended, None before.
    """

    def __init__(self, engines: Engines, request: Request, tokenizer: Any):
        """Submits a request."""
        self.completion: Completion | None = None
        self._output, self._sent = Output(request, tokenizer), 0
        self._news = queue.SimpleQueue[None]()
        self._lock, self._closed = threading.RLock(), False
        request.on_update = functools.partial(self._news.put, None)
        self._engine: Engine | None = engines.submit([request])[0]

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __next__(self) -> str:
        """The next piece of text, never empty.

        Raises:
            Exception: An error of the request, or of the engine.
        """
        try:
            with self._lock:
                return self._next()
        except BaseException:
            self.close()
            raise

    def _next(self) -> str:
        output = self._output
        while not self._closed:
            output.update()
            if output.finish_reason is not None:
                self.completion = output.completion()
            if len(output.settled_text) > self._sent:
                sent, self._sent = self._sent, len(output.settled_text)
                return output.settled_text[sent:]
            if self.completion is not None:
                break
            if (engine := self._engine) is not None:
                engine.check_can_wait()
            del engine
            self._news.get()
        raise StopIteration

    def close(self) -> None:
        """Ends the request, whose slot and pages are freed; does not wait."""
        self._closed, self._engine = True, None  # an ended stream keeps no engine
        self._output.request.cancel()
        self._news.put(None)  # a thread that iterates ends
