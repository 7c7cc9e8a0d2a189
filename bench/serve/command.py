"""``python -m bench serve``: a server under load, measured by clients over real sockets.

Methods are measured one after the other, each with a new server, and the report is written after each. With
``--url`` a running server is measured; any server with OpenAI's API will do. Every set of conversations is
run at fixed concurrency (``--concurrency``), with random arrivals (``--rates``), and at multiples of the rate
that the largest concurrency reached (``--loads``).
"""

import argparse
import os
import shlex
from typing import Any

import numpy as np

from bench.common.options import add_switch, check_known, check_least
from bench.common.report import add_report_arguments, check_report, opening_of, publish
from bench.load.arrivals import Lengths
from bench.serve.clients import Clients
from bench.serve.figures import notes_of, parse_bounds, summed_up, tables_of
from bench.serve.servers import Server, options_of
from bench.serve.sets import ENDPOINTS, SETS, Asking, conversations
from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add("--url", help="URL of a running server, without /v1 (default: a server is started for each method)")
    add("--api-key", help="API key of that server")
    add("--model", help="the model's name there, or the model to serve (default: the demo pair)")
    add("--methods", nargs="+", default=["auto", "tree 16", "tree 64", "chain", "plain"], metavar="METHOD")
    add("--budget", type=int, default=64, help='most nodes of a tree of "auto" (default: 64)')
    add("--max-num-seqs", type=int, default=8, help="number of slots (default: 8)")
    add("--max-model-len", type=int, default=2048, help="tokens per slot (default: 2048)")
    add("--max-waiting", type=int, default=1024, help="longest waiting queue (default: 1024)")
    add("--server-options", metavar="WORDS", help="further options of `jetspec-jax serve`, as one argument")
    add("--sets", nargs="+", default=["random", "shared", "turns"], help=f"among {', '.join(SETS)}")
    add("--endpoint", default="completions", help=f"{' or '.join(ENDPOINTS)} (default: completions)")
    add("--concurrency", type=int, nargs="+", default=[1, 8], help="concurrent conversations (default: 1 8)")
    add("--rates", type=float, nargs="+", help="conversations per second")
    add("--loads", type=float, nargs="+", help="multiples of the largest concurrency's rate")
    add("--num-prompts", type=int, default=64, help="conversations per measurement (default: 64)")
    add("--prompt-tokens", default="lognormal:128:0.5", help="words per turn: N, uniform:A:B, lognormal:M:S")
    add("--shared-tokens", type=int, default=256, help="words of a shared prefix (default: 256)")
    add("--output-tokens", default="uniform:32:96", help="tokens per answer, in the same form")
    add("--temperature", type=float, default=0.0, help="conversation i has seed i (default: 0)")
    add_switch(
        parser,
        "--ignore-eos",
        "answers end only at their length; some servers lack this field",
        default=True,
    )
    add("--goodput", nargs="+", metavar="NAME:MS", help="bounds of a good answer, for example ttft:500")
    add("--seed", type=int, default=0, help="seed of prompts and arrivals (default: 0)")
    add_report_arguments(parser, "serve")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the JSON and the plot."""
    bounds = _check(arguments)
    rates, loads = arguments.rates or [], arguments.loads or []
    check_report(arguments)
    report: dict[str, Any] = {
        **opening_of("serve", arguments),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "rows": [],
        "notes": [],
    }
    rows = report["rows"]
    methods = [arguments.url] if arguments.url else arguments.methods
    scenes = len(arguments.sets) * sum(map(len, (arguments.concurrency, rates, loads)))
    with Progress(total=len(methods) * scenes * arguments.num_prompts, unit="conversation") as bar:
        for method in methods:
            bar.set_description(f"start {method}")
            server = None if arguments.url else _start(arguments, method)
            try:
                rows += _measure(arguments, method, server, bounds, bar)
            finally:
                if server is not None:
                    server.close()
            report["notes"] = notes_of(rows)
            write_json(arguments.json, report)
    publish(arguments, report, tables_of(rows), report["notes"])
    return 0


def _check(arguments: argparse.Namespace) -> dict[str, float]:
    """Checks all settings; returns the bounds of a good answer.

    Raises:
        ValueError: A setting is invalid.
    """
    check_known("sets", arguments.sets, SETS)
    check_known("endpoint", [arguments.endpoint], ENDPOINTS)
    least = ("max_num_seqs", "max_waiting", "concurrency", "num_prompts", "shared_tokens")
    check_least(arguments, 1, *least)
    for method in arguments.methods:
        options_of(method, arguments.budget)
    for name in ("prompt_tokens", "output_tokens"):
        Lengths.parse(getattr(arguments, name))
    for name in ("rates", "loads"):
        if min(given := getattr(arguments, name) or [1]) <= 0:
            raise ValueError(f"--{name} must be positive, not {min(given):g}")
    if arguments.loads and not arguments.concurrency:
        raise ValueError("--loads are multiples of the rate that --concurrency reaches: name a concurrency")
    return parse_bounds(arguments.goodput or ())


def _start(arguments: argparse.Namespace, method: str) -> Server:
    options = [] if arguments.model is None else [arguments.model]
    options += options_of(method, arguments.budget)
    for name in ("max_num_seqs", "max_model_len", "max_waiting"):
        options += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    return Server([*options, *shlex.split(arguments.server_options or "")])


def _measure(
    arguments: argparse.Namespace,
    method: str,
    server: Server | None,
    bounds: dict[str, float],
    bar: Any,
) -> list[dict[str, Any]]:
    """The rows of a method."""
    asking = Asking(
        arguments.model if arguments.url else None,
        arguments.endpoint,
        arguments.temperature,
        arguments.ignore_eos,
    )
    url = arguments.url.removesuffix("/").removesuffix("/v1") if server is None else server.url
    clients = Clients(url, asking, api_key=arguments.api_key)
    rows: list[dict[str, Any]] = []
    for number, name in enumerate(arguments.sets):
        scenes: list[tuple[int | None, float | None, float | None]] = [
            *((count, None, None) for count in sorted(arguments.concurrency)),
            *((None, rate, None) for rate in arguments.rates or ()),
            *((None, None, load) for load in sorted(arguments.loads or ())),
        ]
        peak: dict[str, Any] = {}
        for place, (count, rate, load) in enumerate(scenes):
            if load is not None:
                rate = load * peak["conversations_per_second"]
            # Every measurement has other prompts, so that the prefix cache has none of them.
            rng = np.random.default_rng((arguments.seed, number, place))
            lengths = Lengths.parse(arguments.prompt_tokens), Lengths.parse(arguments.output_tokens)
            drawn = conversations(name, arguments.num_prompts, *lengths, arguments.shared_tokens, rng)
            bar.set_description(
                f"{method}, {name}, " + (f"{count} at a time" if count else f"{rate:.3g} per second")
            )
            answers, seconds = clients.serve(
                drawn, concurrency=count, rate=rate, seed=arguments.seed, step=bar.update
            )
            found = summed_up(answers, seconds, bounds)
            about = {"method": method, "set": name, "concurrency": count, "rate": rate, "load": load}
            row = {**about, **found, "bound_seconds": None}
            row["conversations_per_second"] = row["requests_per_second"] / len(drawn[0].turns)
            if count is not None:
                peak = row
            elif load is not None and server is not None:
                # A request waits until all requests before it, waiting and running, are served at the peak's
                # rate.
                ahead = arguments.max_waiting + arguments.max_num_seqs
                wait = ahead / peak["requests_per_second"]
                row["bound_seconds"] = wait + 1e-3 * peak["e2e"]["p99_ms"]
            rows.append(row)
    return rows
