"""Rounds with their trees for the playground: few at a time, beside the engine that serves the others."""

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from jetspec_jax.engine.prompts import EncodedPrompt
from jetspec_jax.engine.request import DeadlinePassed
from jetspec_jax.inspect.trace import RoundTrace, Trace, trace_rounds
from jetspec_jax.llm import LLM
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.view.data import labels_of, round_data

#: Decimals of log-probabilities: no eye sees more.
DIGITS = 3


class TooManyTraces(Exception):
    """As many requests are traced as may be."""


class Traces:
    """Traces of one `LLM`, at most so many at a time; from any thread.

    Attributes:
        running: How many there are.
    """

    def __init__(self, llm: LLM, most: int):
        """Holds nothing yet.

        Args:
            llm: The models, and the largest trees.
            most: Traces at a time.
        """
        self._llm, self._most, self.running = llm, most, 0
        self._mutex = threading.Lock()

    def begin(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        budget: int | None,
        deadline: float | None = None,
    ) -> "TracedRequest":
        """Starts one; nothing is decoded yet.

        Args:
            prompt: The prompt.
            params: How it is sampled.
            budget: Most nodes of a tree; None is the LLM's.
            deadline: When it is given up, by `time.monotonic`; None is never.

        Raises:
            TypeError: Something is of a wrong type.
            ValueError: The request cannot be served.
            DeviceMemoryError: The device has no room for it beside what it holds.
            TooManyTraces: It must wait.
        """
        with self._mutex:
            if self.running == self._most:
                raise TooManyTraces(
                    f"{self._most} requests are watched already; try again when one has ended"
                )
            self.running += 1
        try:
            llm, settings = self._llm, self._llm.settings
            if budget is not None:
                settings = replace(settings, budget=min(budget, settings.budget))
            trace = trace_rounds(llm.target, llm.draft_head, prompt, params, settings)
        except BaseException:
            self._release()
            raise
        return TracedRequest(trace, llm.target.tokenizer, deadline, self._release)

    def _release(self) -> None:
        with self._mutex:
            self.running -= 1


class TracedRequest:
    """One request that is traced."""

    def __init__(self, trace: Trace, tokenizer: Any, deadline: float | None, release: Callable[[], None]):
        """Takes over a trace.

        Args:
            trace: The trace.
            tokenizer: The target's.
            deadline: When it is given up, by `time.monotonic`; None is never.
            release: Called at its end.
        """
        self._trace, self._tokenizer = trace, tokenizer
        self._deadline, self._release = deadline, release
        self._ended, self._decoding = False, threading.Lock()

    def events(self) -> Generator[dict[str, Any]]:
        """Decodes round by round: JSON values with its text, its number of tokens, its tree, and the end.

        Raises:
            DeadlinePassed: It has not ended in its time.
        """
        chars = tokens = 0
        while (one := self._next_round()) is not None:
            completion, text = self._trace.completion, self._trace.text
            # What the last round committed behind the request's end is no part of it.
            count = len(one.committed) if completion is None else len(completion.token_ids) - tokens
            shown = {"text": text[chars:], "tokens": count, "tree": round_data(one, DIGITS)}
            chars, tokens = len(text), tokens + count
            reason = None if completion is None else completion.finish_reason
            labels = labels_of([one], self._tokenizer)
            yield {"rounds": [shown], "labels": labels, "finish_reason": reason}
            if completion is None and self._deadline is not None and time.monotonic() > self._deadline:
                raise DeadlinePassed(f"{tokens} tokens had come by then")

    def _next_round(self) -> RoundTrace | None:
        with self._decoding:
            return None if self._ended else next(self._trace, None)

    def close(self) -> None:
        """Ends it, run to its end or not, once no thread decodes a round of it; its stores are free again."""
        with self._decoding:
            if not self._ended:
                self._ended = True
                self._trace.close()
                self._release()
