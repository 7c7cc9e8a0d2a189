"""Prometheus metrics of the engine, read from `AsyncLLM.stats` at each scrape."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.engine.stats import EngineStats
from jetspec_jax.serve.metrics import PREFIX

_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests that have a slot.", lambda stats: stats.running),
    "num_requests_waiting": ("Requests that wait for a slot.", lambda stats: stats.waiting),
    "kv_cache_usage_perc": (
        "Share of the pages that requests hold; 1 is all.",
        lambda stats: stats.pages_used / stats.pages if stats.pages else 0.0,
    ),
    "kv_cache_pages": ("Pages that there are.", lambda stats: stats.pages),
    "kv_cache_pages_cached": ("Pages that are kept for requests to come.", lambda stats: stats.pages_cached),
    "bucket": ("Nodes of the trees of the last dispatch.", lambda stats: stats.bucket),
    "live_slots": ("Slots that the last dispatch was for.", lambda stats: stats.live_slots),
    "programs_left": (
        "Programs that are still compiled in the background.",
        lambda stats: stats.programs_left,
    ),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prefix_cache_queries": ("Tokens of prompts that were looked up.", lambda stats: stats.prefix_queries),
    "prefix_cache_hits": ("Those of them that were in the cache.", lambda stats: stats.prefix_hits),
    "num_preemptions": ("How often a request lost its slot.", lambda stats: stats.preemptions),
    "dispatches": ("Dispatches with rounds.", lambda stats: stats.dispatches),
    "idle_rounds": (
        "Rounds for requests that had ended, one per round and request.",
        lambda stats: stats.idle_rounds,
    ),
    "compilations": ("Programs compiled since the warm-up.", lambda stats: stats.compilations),
    "spec_decode_num_drafts": ("Trees that were verified.", lambda stats: stats.drafts),
    "spec_decode_num_draft_tokens": ("Tokens that were drafted.", lambda stats: stats.drafted_tokens),
    "spec_decode_num_accepted_tokens": (
        "Drafted tokens that were accepted.",
        lambda stats: stats.accepted_tokens,
    ),
}
_BY_DEPTH = "spec_decode_num_accepted_tokens_per_pos"


class EngineFigures:
    """A collector for the Prometheus client library."""

    def __init__(self, llm: AsyncLLM, model: str):
        """Takes the engine, and the model's name as the label of all metrics."""
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        stats = self._llm.stats()
        for name, (help, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
            gauge.add_metric([self._model], value(stats))
            yield gauge
        for name, (help, value) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
            counter.add_metric([self._model], value(stats))
            yield counter
        depths = CounterMetricFamily(
            PREFIX + _BY_DEPTH, "Drafted tokens accepted at each depth.", labels=["model_name", "position"]
        )
        for place, count in enumerate(stats.accepted_by_depth):
            depths.add_metric([self._model, str(place)], count)
        yield depths
