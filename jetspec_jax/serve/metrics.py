"""Prometheus metrics of the server, with vLLM's names."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jetspec_jax.async_llm import Delta
from jetspec_jax.engine.output import Completion

#: The prefix of all names.
PREFIX = "jetspec:"
# Bucket bounds of histograms, in seconds.
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
    """The server's counters and histograms; the engine's metrics are read at each scrape.

    Attributes:
        registry: The registry of all metrics.
    """

    def __init__(self, model: str):
        """Creates the metrics; ``model`` is a label of all of them."""
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, help, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, help: str, buckets: Iterable[float]) -> Histogram:
            metric = Histogram(
                PREFIX + name, help, ("model_name",), buckets=tuple(buckets), registry=self.registry
            )
            return metric.labels(model)

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
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Adds a gauge whose value is computed at each scrape."""
        metric = Gauge(PREFIX + name, help, ("model_name",), registry=self.registry)
        metric.labels(self._model).set_function(value)

    def answered(self, path: str, status: int) -> None:
        """Counts an HTTP request; ``path`` is the path of a route, so the label has few values."""
        self._http.labels(self._model, path, str(status)).inc()

    def prompt(self, tokens: int) -> None:
        """Counts the tokens of a prompt when its answer begins."""
        self._prompt.inc(tokens)

    def generated(self, count: int, seconds: float, *, first: bool) -> None:
        """Counts tokens of a completion that arrived together.

        Args:
            count: Number of tokens.
            seconds: Time since the request's arrival if ``first``, else since the previous tokens; it is
                divided evenly over the tokens.
            first: Whether these are the first tokens of the completion.
        """
        self._generated.inc(count)
        if first:
            self._first.observe(seconds)
            return
        for _ in range(count):
            self._between.observe(seconds / count)

    def ended(self, completion: Completion, seconds: float) -> None:
        """Counts a finished completion, with the seconds since the request's arrival."""
        self._ended.labels(self._model, completion.finish_reason).inc()
        self._whole.observe(seconds)
        if completion.metrics is not None and completion.metrics.queue_time is not None:
            self._queue.observe(completion.metrics.queue_time)

    def timer(self) -> "CompletionTimer":
        """A timer for the completions of one prompt, started now."""
        return CompletionTimer(self)


class CompletionTimer:
    """Measures the times between deltas of a prompt's completions."""

    def __init__(self, metrics: Metrics):
        """Starts the timer."""
        self._metrics, self._start = metrics, time.monotonic()
        self._last: dict[int, float] = {}

    def record(self, delta: Delta) -> None:
        """Records a delta, whose tokens arrived together."""
        now, count = time.monotonic(), len(delta.token_ids)
        if count:
            last = self._last.get(delta.index)
            since = self._start if last is None else last
            self._metrics.generated(count, now - since, first=last is None)
            self._last[delta.index] = now
        if delta.completion is not None:
            self._metrics.ended(delta.completion, now - self._start)
