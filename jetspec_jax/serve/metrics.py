"""Prometheus metrics of the server, with vLLM's names."""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from jetspec_jax.async_llm import Delta

#: The prefix of all names.
PREFIX = "jetspec:"
# Bucket bounds of histograms, in seconds.
_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160),
)
_WHOLE = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """The server's counters and histograms; the engine's metrics are read at each scrape."""

    def __init__(self, model: str):
        self.registry = CollectorRegistry()

        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, help, ("model_name", *labels), registry=self.registry)

        def histogram(name: str, help: str, buckets: Iterable[float]) -> Histogram:
            metric = Histogram(
                PREFIX + name, help, ("model_name",), buckets=tuple(buckets), registry=self.registry
            )
            return metric.labels(model)

        self.model = model
        self.prompt = counter("prompt_tokens", "Tokens of prompts that were answered.").labels(model)
        self.generated = counter("generation_tokens", "Tokens that were generated.").labels(model)
        self.ended = counter("request_success", "Completions that ended, by reason.", "finished_reason")
        self._http = counter("http_requests", "HTTP requests, by path and status.", "path", "status")
        self.first = histogram("time_to_first_token_seconds", "From arrival to the first tokens.", _FIRST)
        self.between = histogram("inter_token_latency_seconds", "From a token to the next.", _TOKEN)
        self.queue = histogram("request_queue_time_seconds", "From arrival until there was a slot.", _WHOLE)
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.", _WHOLE)

    def gauge(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Adds a gauge whose value is computed at each scrape."""
        metric = Gauge(PREFIX + name, help, ("model_name",), registry=self.registry)
        metric.labels(self.model).set_function(value)

    def answered(self, path: str, status: int) -> None:
        """Counts an HTTP request; ``path`` is the path of a route, so the label has few values."""
        self._http.labels(self.model, path, str(status)).inc()


class CompletionTimer:
    """Counts and times the completions of one prompt, from now on."""

    def __init__(self, metrics: Metrics, prompt_tokens: int):
        self._metrics, self._prompt_tokens, self._start = metrics, prompt_tokens, time.monotonic()
        self._last: dict[int, float] = {}

    def record(self, delta: Delta) -> None:
        """Records a delta; its tokens arrived together, and share the time since those before them."""
        metrics, now, count = self._metrics, time.monotonic(), len(delta.token_ids)
        metrics.prompt.inc(self._prompt_tokens)
        self._prompt_tokens = 0
        if count:
            metrics.generated.inc(count)
            last = self._last.get(delta.index)
            if last is None:
                metrics.first.observe(now - self._start)
            else:
                for _ in range(count):
                    metrics.between.observe((now - last) / count)
            self._last[delta.index] = now
        if (completion := delta.completion) is not None:
            metrics.ended.labels(metrics.model, completion.finish_reason).inc()
            metrics.whole.observe(now - self._start)
            if completion.metrics is not None and completion.metrics.queue_time is not None:
                metrics.queue.observe(completion.metrics.queue_time)
