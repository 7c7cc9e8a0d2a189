"""Traces of requests for the playground: a few at a time, beside the engine."""

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from jetspec_jax.engine.prompts import EncodedPrompt
from jetspec_jax.engine.request import DeadlinePassed
from jetspec_jax.inspect.trace import RoundTrace, Trace, trace_request
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.serve.errors import ApiError
from jetspec_jax.view.data import labels_of, round_data

#: Decimals of log-probabilities on the page.
DIGITS = 3


class Traces:
    """Traces of one `LLM`, with a limit of traces at a time; thread-safe."""

    def __init__(self, llm: LLM, most: int):
        self._llm, self._most, self.running = llm, most, 0
        self._mutex = threading.Lock()

    def begin(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        budget: int | None,
        deadline: float | None = None,
    ) -> "TracedRequest":
        """Starts a trace; decoding begins with its events. The ``deadline`` is one of `time.monotonic`."""
        with self._mutex:
            if self.running == self._most:
                message = f"{self._most} requests are traced already; try again when one has ended"
                raise ApiError(429, message, code="too_many_traces", headers={"Retry-After": "5"})
            self.running += 1
        try:
            settings = self._llm.settings
            if budget is not None:
                settings = replace(settings, budget=budget)
            trace = trace_request(self._llm.engines, settings, prompt, params)
        except BaseException:
            self._release()
            raise
        return TracedRequest(trace, self._llm.target.tokenizer, deadline, self._release)

    def _release(self) -> None:
        with self._mutex:
            self.running -= 1


class TracedRequest:
    """A traced request."""

    def __init__(self, trace: Trace, tokenizer: Any, deadline: float | None, release: Callable[[], None]):
        self._trace, self._tokenizer = trace, tokenizer
        self._deadline, self._release = deadline, release
        self._ended, self._decoding = False, threading.Lock()

    def events(self) -> Generator[dict[str, Any]]:
        """Decodes round by round; yields JSON values with text, token count, tree and finish reason."""
        chars = tokens = 0
        while (record := self._next_round()) is not None:
            completion, text = self._trace.completion, self._trace.text
            # Tokens that the last round committed after the request's end do not count.
            count = len(record.committed) if completion is None else len(completion.token_ids) - tokens
            shown = {"text": text[chars:], "tokens": count, "tree": round_data(record, DIGITS)}
            chars, tokens = len(text), tokens + count
            reason = None if completion is None else completion.finish_reason
            labels = labels_of([record], self._tokenizer)
            yield {"rounds": [shown], "labels": labels, "finish_reason": reason}
            if completion is None and self._deadline is not None and time.monotonic() > self._deadline:
                raise DeadlinePassed(f"{tokens} tokens had come by then")

    def _next_round(self) -> RoundTrace | None:
        with self._decoding:
            return None if self._ended else next(self._trace, None)

    def close(self) -> None:
        """Closes the trace and frees its slot, after waiting for a round that another thread decodes."""
        with self._decoding:
            if not self._ended:
                self._ended = True
                self._trace.close()
                self._release()
