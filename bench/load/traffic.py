"""Runs methods in turn on the same arrivals: throughput and latency."""

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bench.common.methods import AUTO, PLAIN_METHOD, Method
from bench.common.pair import Pair
from bench.common.timing import median
from bench.load.arrivals import poisson
from bench.load.driving import Load, TimedRequest, quantiles
from jetspec_jax import SamplingParams
from jetspec_jax.inspect.exactness import first_divergence

# The smallest trees in the check of outputs.
_CHECKED_NODES = 16
Prompts = Sequence[tuple[list[int], SamplingParams]]


def measure_traffic(
    pair: Pair,
    methods: Sequence[Method],
    prompts: Prompts,
    given: argparse.Namespace,
    step: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Serves the same prompts with every method, at fixed concurrency or with random arrivals.

    Methods alternate, so that a slow period of the machine affects all of them. An engine has as many slots
    as concurrent requests, and with random arrivals as many as the largest concurrency.

    Args:
        given: The command line. The first turn of "auto" takes ``warm_up_seconds``, that of other methods
            two prompts per slot; later turns take ``seconds``, or each prompt once.
        step: Called with the name of each step.
    """
    rows = []
    need = max(len(prompt) + (params.max_tokens or 0) for prompt, params in prompts)
    for count, rate in [*((n, None) for n in given.concurrency), *((None, rate) for rate in given.rates)]:
        slots = count or max(given.concurrency)
        loads = {}
        for method in methods:
            step(f"compile {method.name}, {slots} slots")
            loads[method] = Load(
                pair,
                method.settings,
                slots=slots,
                capacity=-(-need // 64) * 64,
                implementation=given.implementation,
                live=(),
                least_nodes=given.least_nodes,
            )
        runs: dict[Method, list[dict[str, Any]]] = {method: [] for method in methods}
        for turn in range(1 + given.repeats):
            for method, load in loads.items():
                step(f"{method.name}, {f'{count} at a time' if rate is None else f'{rate:g} a second'}")
                # The first turn compiles the remaining programs, teaches "auto", and is not timed.
                learns = method.algorithm == AUTO
                limit = given.seconds if turn else given.warm_up_seconds if learns else None
                part = prompts if turn or limit else prompts[: 2 * slots]
                found = _serve(load, part, count, rate, given.seed + turn, limit)
                if turn:
                    runs[method].append(found)
        for method, load in loads.items():
            load.close()
            rows.append(
                {"method": method.name, "concurrency": count, "rate": rate, **_together(runs[method])}
            )
    return rows


def _serve(
    load: Load, prompts: Prompts, count: int | None, rate: float | None, seed: int, limit: float | None
) -> dict[str, Any]:
    """Serves the prompts once, or for ``limit`` seconds over and over."""
    made: list[TimedRequest] = []
    ended = load.serve(_coming(load, prompts, rate, seed, limit is not None, made), count, limit or math.inf)
    # Requests without tokens by then have no times.
    requests = [timed for timed in made if timed.tokens(ended)]
    lengths = [length for timed in requests for length in timed.request.accept_lengths]
    return {
        "seconds": ended,
        "tokens": sum(timed.tokens(ended) for timed in requests),
        "requests": requests,
        "tau": sum(lengths) / len(lengths) if lengths else math.nan,
        "host_ms": [1e3 * host for host in load.spent.host],
    }


def _coming(
    load: Load, prompts: Prompts, rate: float | None, seed: int, again: bool, made: list[TimedRequest]
) -> Iterator[TimedRequest]:
    """The requests, with random arrivals if there is a rate, and also appended to ``made``."""
    rng, due = np.random.default_rng(seed), 0.0
    for number, (prompt, params) in enumerate(itertools.cycle(prompts) if again else prompts):
        due += 0.0 if rate is None else rng.exponential(1 / rate)
        made.append(load.request(prompt, params, due))
        # With a salt, no request finds a prompt of earlier turns in the prefix cache.
        made[-1].request.cache_salt = f"{seed} {number // len(prompts)}"
        yield made[-1]


def _together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The row of a method: medians of its turns' rates, and distributions over the requests of all turns."""
    requests: list[TimedRequest] = [timed for run in runs for timed in run["requests"]]
    host = [milliseconds for run in runs for milliseconds in run["host_ms"]]
    return {
        "tokens_per_second": median([run["tokens"] / run["seconds"] for run in runs]),
        "tau": median([run["tau"] for run in runs]),
        "first_token": quantiles([timed.first_token or 0.0 for timed in requests]),
        "gaps": quantiles([gap for timed in requests for gap in timed.gaps()]),
        "dispatches": len(host) / len(runs),
        "host_ms": median(host),
        "tokens": runs[0]["tokens"],
        "runs": [run["tokens"] / run["seconds"] for run in runs],
    }


def check_outputs(pair: Pair, methods: Sequence[Method], prompts: Prompts, capacity: int) -> int:
    """Serves prompts together, by plain decoding and with each method, and compares them with each alone.

    Returns:
        The number of compared tokens.

    Raises:
        RuntimeError: A method's tokens differ.
    """
    rng, compared, expected = np.random.default_rng(0), 0, []
    for method in (PLAIN_METHOD, *methods):
        given = {"slots": len(prompts), "capacity": capacity, "live": (), "least_nodes": _CHECKED_NODES}
        load = Load(pair, method.settings, **given)
        if not expected:
            for number, (prompt, params) in enumerate(prompts):
                alone = load.request(prompt, params)
                alone.request.cache_salt = str(number)
                load.serve([alone], 1)
                expected.append(alone.request.tokens)
        due = poisson(50.0, len(prompts), rng)
        requests = [
            load.request(prompt, params, at) for at, (prompt, params) in zip(due, prompts, strict=True)
        ]
        load.serve(requests)
        load.close()
        for (prompt, params), timed, tokens in zip(prompts, requests, expected, strict=True):
            compared += len(tokens)
            difference = first_divergence(pair.target, prompt, params, timed.request.tokens, tokens)
            if difference is not None and not difference.is_tie:
                raise RuntimeError(f"{method.name} does not give plain decoding's tokens: {difference}")
    return compared
