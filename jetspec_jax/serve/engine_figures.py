"""Prometheus metrics of the engine, read from `AsyncLLM.stats` at each scrape."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from jetspec_jax.async_llm import AsyncLLM
from jetspec_jax.serve.metrics import PREFIX

# Name, help, and the field of `EngineStats`.
_GAUGES = (
    ("num_requests_running", "Requests that have a slot.", "running"),
    ("num_requests_waiting", "Requests that wait for a slot.", "waiting"),
    ("kv_cache_pages", "Pages that there are.", "pages"),
    ("kv_cache_pages_cached", "Pages that are kept for requests to come.", "pages_cached"),
    ("bucket", "Nodes of the trees of the last dispatch.", "bucket"),
    ("live_slots", "Slots that the last dispatch was for.", "live_slots"),
    ("programs_left", "Programs that are still compiled in the background.", "programs_left"),
)
_COUNTERS = (
    ("prefix_cache_queries", "Tokens of prompts that were looked up.", "prefix_queries"),
    ("prefix_cache_hits", "Those of them that were in the cache.", "prefix_hits"),
    ("num_preemptions", "How often a request lost its slot.", "preemptions"),
    ("dispatches", "Dispatches with rounds.", "dispatches"),
    ("idle_rounds", "Rounds for requests that had ended, one per round and request.", "idle_rounds"),
    ("compilations", "Programs compiled since the warm-up.", "compilations"),
    ("spec_decode_num_drafts", "Trees that were verified.", "drafts"),
    ("spec_decode_num_draft_tokens", "Tokens that were drafted.", "drafted_tokens"),
    ("spec_decode_num_accepted_tokens", "Drafted tokens that were accepted.", "accepted_tokens"),
)
_BY_DEPTH = "spec_decode_num_accepted_tokens_per_pos"


class EngineFigures:
    """A collector for the Prometheus client library."""

    def __init__(self, llm: AsyncLLM, model: str):
        self._llm, self._model = llm, model

    def collect(self) -> Iterator[Metric]:
        """The current values."""
        stats = self._llm.stats()
        share = stats.pages_used / stats.pages if stats.pages else 0.0
        values = [(GaugeMetricFamily, name, help, getattr(stats, field)) for name, help, field in _GAUGES]
        values += [
            (CounterMetricFamily, name, help, getattr(stats, field)) for name, help, field in _COUNTERS
        ]
        pages = "Share of the pages that requests hold; 1 is all."
        for family, name, help, value in (*values, (GaugeMetricFamily, "kv_cache_usage_perc", pages, share)):
            metric = family(PREFIX + name, help, labels=["model_name"])
            metric.add_metric([self._model], value)
            yield metric
        depths = CounterMetricFamily(
            PREFIX + _BY_DEPTH, "Drafted tokens accepted at each depth.", labels=["model_name", "position"]
        )
        for place, count in enumerate(stats.accepted_by_depth):
            depths.add_metric([self._model, str(place)], count)
        yield depths
