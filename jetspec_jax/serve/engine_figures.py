"""The engine's own figures for Prometheus, taken from `AsyncLLM.stats` when they are asked for."""

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.engine.stats import EngineStats
from jetspec_jax.serve.metrics import PREFIX

_GAUGES: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "num_requests_running": ("Requests that have a slot.", lambda own: own.running),
    "num_requests_waiting": ("Requests that wait for a slot.", lambda own: own.waiting),
    "kv_cache_usage_perc": (
        "Share of the pages that requests hold; 1 is all.",
        lambda own: own.pages_used / own.pages if own.pages else 0.0,
    ),
    "kv_cache_pages": ("Pages that there are.", lambda own: own.pages),
    "kv_cache_pages_cached": ("Pages that are kept for requests to come.", lambda own: own.pages_cached),
    "bucket": ("Nodes of the trees of the last dispatch.", lambda own: own.bucket),
    "live_slots": ("Slots that the last dispatch was for.", lambda own: own.live_slots),
}
_COUNTERS: dict[str, tuple[str, Callable[[EngineStats], float]]] = {
    "prefix_cache_queries": ("Tokens of prompts that were looked up.", lambda own: own.prefix_queries),
    "prefix_cache_hits": ("Those of them that were in the cache.", lambda own: own.prefix_hits),
    "num_preemptions": ("How often a request lost its slot.", lambda own: own.preemptions),
    "dispatches": ("Dispatches with rounds.", lambda own: own.dispatches),
    "compilations": ("Programs compiled since the warm-up.", lambda own: own.compilations),
    "spec_decode_num_drafts": ("Trees that were verified.", lambda own: own.drafts),
    "spec_decode_num_draft_tokens": ("Tokens that were drafted.", lambda own: own.drafted_tokens),
    "spec_decode_num_accepted_tokens": (
        "Drafted tokens that were accepted.",
        lambda own: own.accepted_tokens,
    ),
}
_BY_DEPTH = "spec_decode_num_accepted_tokens_per_pos"


class EngineFigures:
    """A collector of Prometheus' library."""

    def __init__(self, llm: AsyncLLM, model: str):
        """Takes the engine, and the label of all figures."""
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
        """The figures by now."""
        own = self._llm.stats()
        for name, (help, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, help, labels=["model_name"])
            gauge.add_metric([self._model], value(own))
            yield gauge
        for name, (help, value) in _COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, help, labels=["model_name"])
            counter.add_metric([self._model], value(own))
            yield counter
        depths = CounterMetricFamily(
            PREFIX + _BY_DEPTH, "Drafted tokens accepted at each depth.", labels=["model_name", "position"]
        )
        for place, count in enumerate(own.accepted_by_depth):
            depths.add_metric([self._model, str(place)], count)
        yield depths
