"""Figures for Prometheus, under vLLM's names."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jetspec_jax.async_llm import Delta
from jetspec_jax.engine.output import Completion

#: Before all names.
PREFIX = "jetspec:"
# Bounds of seconds.
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """What a server counts and measures; the engine's own figures are looked up when they are asked for.

    Attributes:
        registry: Of all of them.
    """

    def __init__(self, model: str):
        """Begins with nothing; ``model`` is a label of all figures."""
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, help, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, help: str, buckets: Iterable[float]) -> Histogram:
            own = Histogram(
                PREFIX + name, help, ("model_name",), buckets=tuple(buckets), registry=self.registry
            )
            return own.labels(model)

        self._model = model
        self._prompt = counter("prompt_tokens", "Tokens of prompts that were answered.").labels(model)
        self._generated = counter("generation_tokens", "Tokens that were generated.").labels(model)
        self._ended = counter("request_success", "Completions that ended, by reason.", "finished_reason")
        self._http = counter("http_requests", "HTTP requests, by path and status.", "path", "status")
        self._first = histogram("time_to_first_token_seconds", "From arrival to the first tokens.", _FIRST)
        self._between = histogram("inter_token_latency_seconds", "From a token to the next.", _TOKEN)
        self._queue = histogram("request_queue_time_seconds", "From arrival until there was a slot.", _WHOLE)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)

    def exposition(self) -> bytes:
        """All of them as text."""
        return generate_latest(self.registry)

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Adds a figure that is looked up when it is asked for."""
        own = Gauge(PREFIX + name, help, ("model_name",), registry=self.registry)
        own.labels(self._model).set_function(value)

    def answered(self, path: str, status: int) -> None:
        """Counts an HTTP request; ``path`` is a route's, of which there are few."""
        self._http.labels(self._model, path, str(status)).inc()

    def prompt(self, tokens: int) -> None:
        """Counts a prompt whose answer begins."""
        self._prompt.inc(tokens)

    def generated(self, count: int, seconds: float, *, first: bool) -> None:
        """Counts tokens of a completion that came at once.

        Args:
            count: How many.
            seconds: Since the request came, or since the tokens before. Then they count as if they had come
                evenly.
            first: Whether they are its first.
        """
        self._generated.inc(count)
        if first:
            self._first.observe(seconds)
            return
        for _ in range(count):
            self._between.observe(seconds / count)

    def ended(self, completion: Completion, seconds: float) -> None:
        """Notes a completion that has ended, so many seconds after it came."""
        self._ended.labels(self._model, completion.finish_reason).inc()
        self._whole.observe(seconds)
        if completion.metrics is not None and completion.metrics.queue_time is not None:
            self._queue.observe(completion.metrics.queue_time)

    def following(self) -> "Following":
        """Follows the completions of one prompt, from now on."""
        return Following(self)


class Following:
    """Times the pieces of a prompt's completions."""

    def __init__(self, metrics: Metrics):
        """Begins now."""
        self._metrics, self._start = metrics, time.monotonic()
        self._last: dict[int, float] = {}

    def saw(self, delta: Delta) -> None:
        """Takes a piece, whose tokens all came at once."""
        now, count = time.monotonic(), len(delta.token_ids)
        if count:
            last = self._last.get(delta.index)
            since = self._start if last is None else last
            self._metrics.generated(count, now - since, first=last is None)
            self._last[delta.index] = now
        if delta.completion is not None:
            self._metrics.ended(delta.completion, now - self._start)
