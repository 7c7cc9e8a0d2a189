"""Metrics of a server as Prometheus itself reads them: run by hand, where ``prometheus`` is installed.

The server answers requests whose tokens are known. Prometheus scrapes it as ``deploy/prometheus.yml`` says;
its figures must be those of the requests, and every query of the dashboard must find something.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from jetspec_jax.serve.running import bind
from tests.serve.servers import Command

DEPLOY = Path(__file__).parents[2] / "deploy"
#: Requests: how many, and the tokens of each.
REQUESTS, TOKENS = 6, 20
#: Nodes of every tree: the algorithm fills the budget.
NODES = 8
#: Several pages long, so that all requests but the first find some in the cache.
PROMPT = "def read_lines(path):\n    pass\n\n\n" * 20
#: Counters of the engine.
ENGINE = tuple(
    f"jetspec:{name}_total"
    for name in (
        *("prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts"),
        *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    )
)
BY_DEPTH = "sum(jetspec:spec_decode_num_accepted_tokens_per_pos_total)"
# Seconds between two scrapes, and those that anything may take.
_INTERVAL, _PATIENCE = 1, 60


class Prometheus:
    """The program, which scrapes one server."""

    def __init__(self, program: str, folder: Path, server: str):
        """Starts it with the configuration of ``deploy/``, and another address and interval."""
        config = (DEPLOY / "prometheus.yml").read_text(encoding="utf-8")
        for given, own in (
            ("jetspec:8000", server),
            ("scrape_interval: 5s", f"scrape_interval: {_INTERVAL}s"),
        ):
            assert given in config, given
            config = config.replace(given, own)
        (folder / "prometheus.yml").write_text(config, encoding="utf-8")
        with contextlib.closing(bind("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [
                program,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                "--log.level=warn",
            ]
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=_PATIENCE)

    def ask(self, query: str) -> list[dict[str, Any]]:
        """What a query finds: labels and values."""
        got = self._client.get("/query", params={"query": query})
        assert got.is_success, f"{query}: {got.text}"
        return got.json()["data"]["result"]

    def value(self, query: str) -> float:
        """The one value of a query, 0 where nothing is found."""
        found = self.ask(query)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else 0.0

    def until(self, query: str, value: float) -> None:
        """Waits until a query has a value."""
        end, found = time.monotonic() + _PATIENCE, None
        while found != value:
            assert time.monotonic() < end, f"{query} is {found}, not {value}"
            time.sleep(_INTERVAL / 4)
            with contextlib.suppress(httpx.ConnectError):  # it does not listen yet
                found = self.value(query)

    def close(self) -> None:
        """Ends it."""
        self._client.close()
        self.process.terminate()
        self.process.wait(_PATIENCE)


def known_run(server: str) -> dict[str, float]:
    """Sends requests; the figures that must come of them."""
    body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    usages, drafts = [], []
    with httpx.Client(base_url=server, timeout=_PATIENCE) as client:
        for _ in range(REQUESTS):
            got = client.post("/v1/completions", json=body).raise_for_status().json()
            usages.append(got["usage"])
            drafts.append(got["metrics"]["speculative_decoding"])
        assert client.post("/v1/completions", json={"prompt": ""}).status_code == 400
    prompts = sum(usage["prompt_tokens"] for usage in usages)
    hits = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert hits > 0
    accepted = sum(own["num_accepted_draft_tokens"] for own in drafts)
    return {
        "jetspec:prompt_tokens_total": prompts,
        "jetspec:generation_tokens_total": REQUESTS * TOKENS,
        'jetspec:request_success_total{finished_reason="length"}': REQUESTS,
        'jetspec:http_requests_total{path="/v1/completions",status="200"}': REQUESTS,
        'jetspec:http_requests_total{path="/v1/completions",status="400"}': 1,
        "jetspec:prefix_cache_queries_total": prompts,
        "jetspec:prefix_cache_hits_total": hits,
        "jetspec:time_to_first_token_seconds_count": REQUESTS,
        "jetspec:e2e_request_latency_seconds_count": REQUESTS,
        "jetspec:request_queue_time_seconds_count": REQUESTS,
        'jetspec:e2e_request_latency_seconds_bucket{le="+Inf"}': REQUESTS,
        "jetspec:spec_decode_num_drafts_total": sum(own["num_spec_steps"] for own in drafts),
        "jetspec:spec_decode_num_draft_tokens_total": sum(
            (NODES - 1) * own["num_spec_steps"] for own in drafts
        ),
        "jetspec:spec_decode_num_accepted_tokens_total": accepted,
        BY_DEPTH: accepted,
        "jetspec:num_requests_running": 0,
        "jetspec:num_requests_waiting": 0,
        "jetspec:kv_cache_usage_perc": 0,
        "jetspec:num_preemptions_total": 0,
        "jetspec:compilations_total": 0,
    }


def dashboard_queries() -> Iterator[str]:
    """Those of all panels, for all servers and models in the last minute."""
    dashboard = json.loads((DEPLOY / "grafana.json").read_text(encoding="utf-8"))
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name in ("$model", "$instance"):
                query = query.replace(f'"{name}"', '".*"')
            yield query.replace("$__rate_interval", "1m")


def look(prometheus: Prometheus, server: str) -> None:
    """Checks all that the module says."""
    # A rate needs a scrape from before.
    prometheus.until("up", 1)
    prometheus.until("jetspec:programs_left", 0)
    time.sleep(2 * _INTERVAL)
    # The engine's own counters have begun with the requests that warm it up.
    begun = {query: prometheus.value(query) for query in (*ENGINE, BY_DEPTH)}
    wanted = known_run(server)
    prometheus.until("jetspec:e2e_request_latency_seconds_count", REQUESTS)
    for query, value in wanted.items():
        found = prometheus.value(query) - begun.get(query, 0)
        print(f"{query} {found:g}")
        assert found == value, f"{query} is {found}, not {value}"
        if value == 0:
            assert prometheus.ask(query), f"there is no {query}"
    for series in prometheus.ask('{__name__=~"jetspec:.*"}'):
        assert series["metric"]["model_name"] == "demo", series
    count = 0
    for query in dashboard_queries():
        assert "$" not in query, query
        assert prometheus.ask(query), f"the dashboard's {query} finds nothing"
        count += 1
    print(
        f"{len(wanted)} figures are those of {REQUESTS} requests; {count} queries of the dashboard find some"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Starts both programs and looks; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prometheus", default="prometheus", help="the program (default: prometheus)")
    options = parser.parse_args(argv)
    if (program := shutil.which(options.prometheus)) is None:
        print(f"no {options.prometheus}: install Debian's package prometheus, or name it", file=sys.stderr)
        return 2
    words = ("--dtype", "float32", "--budget", str(NODES), "--algorithm", "top_nodes", "--max-num-seqs", "2")
    command = Command(*words, "--per-request-spec-decode-metrics", "summary", output=subprocess.DEVNULL)
    try:
        with tempfile.TemporaryDirectory() as folder:
            prometheus = Prometheus(program, Path(folder), command.url.removeprefix("http://"))
            with contextlib.closing(prometheus):
                look(prometheus, command.url)
    finally:
        command.process.kill()
        command.process.communicate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
