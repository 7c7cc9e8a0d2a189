"""Methods in turns on the same arrivals: how fast, and how long each request waits."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bench.common.methods import PLAIN_METHOD, Method
from bench.common.pair import Pair
from bench.common.timing import median
from bench.load.arrivals import poisson
from bench.load.driving import Followed, Load, quantiles
from jetspec_jax import SamplingParams
from jetspec_jax.inspect.exactness import first_divergence

# The smallest trees where outputs are checked.
_CHECKED_NODES = 16
Prompts = Sequence[tuple[list[int], SamplingParams]]


def measure_traffic(
    pair: Pair,
    methods: Sequence[Method],
    prompts: Prompts,
    *,
    concurrency: Sequence[int],
    rates: Sequence[float],
    repeats: int,
    capacity: int,
    least_nodes: int,
    implementation: str | None,
    seed: int,
    step: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Serves the same prompts with every method, so many at a time or as they come.

    Methods take turns, so that a slow spell of the machine falls on all. An engine has as many slots as
    requests are served at a time, or for arrivals over time as many as the largest number of these.

    Args:
        pair: The models.
        methods: The methods.
        prompts: Prompts, and how each is sampled.
        concurrency: Requests that are served at a time.
        rates: Requests a second that come, whoever has been served.
        repeats: Turns of each method.
        capacity: Tokens of a slot.
        least_nodes: Of the smallest trees that "auto" chooses from.
        implementation: Of tree attention.
        seed: Of the arrivals.
        step: Called with what comes next.
    """
    rows = []
    most = max(concurrency)
    for count, rate in [*((count, None) for count in concurrency), *((None, rate) for rate in rates)]:
        slots = count or most
        loads = {}
        for method in methods:
            step(f"compile {method.name}, {slots} slots")
            loads[method] = _load(pair, method, slots, capacity, least_nodes, implementation)
        runs: dict[Method, list[dict[str, Any]]] = {method: [] for method in methods}
        for turn in range(1 + repeats):
            for method, load in loads.items():
                step(f"{method.name}, {_scene(count, rate)}")
                # The first turn compiles what is left.
                part = prompts[: 2 * slots] if turn == 0 else prompts
                found = _serve(load, part, count, rate, seed + turn)
                if turn:
                    runs[method].append(found)
        for method, load in loads.items():
            load.close()
            rows.append(
                {"method": method.name, "concurrency": count, "rate": rate, **_together(runs[method])}
            )
    return rows


def _scene(count: int | None, rate: float | None) -> str:
    return f"{count} at a time" if rate is None else f"{rate:g} a second"


def _load(
    pair: Pair,
    method: Method,
    slots: int,
    capacity: int,
    least_nodes: int,
    implementation: str | None = None,
) -> Load:
    return Load(
        pair,
        method.settings,
        slots=slots,
        capacity=capacity,
        implementation=implementation,
        live=(),
        least_nodes=least_nodes,
    )


def _serve(load: Load, prompts: Prompts, count: int | None, rate: float | None, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    due = [0.0] * len(prompts) if rate is None else poisson(rate, len(prompts), rng)
    # What an earlier turn has left in the stores would be found again.
    salt = str(seed)
    line = []
    for at, (prompt, params) in zip(due, prompts, strict=True):
        own = load.request(prompt, params, at)
        own.request.cache_salt = salt
        line.append(own)
    seconds = load.serve(line, count)
    tokens = sum(len(one.request.tokens) for one in line)
    lengths = [length for one in line for length in one.request.accept_lengths]
    return {
        "seconds": seconds,
        "tokens": tokens,
        "line": line,
        "tau": sum(lengths) / len(lengths),
        "host_ms": [1e3 * own for own in load.spent.host],
        "outputs": [one.request.tokens for one in line],
    }


def _together(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of all turns of a method: rates as medians, requests all together."""
    line: list[Followed] = [one for run in runs for one in run["line"]]
    host = [own for run in runs for own in run["host_ms"]]
    return {
        "tokens_per_second": median([run["tokens"] / run["seconds"] for run in runs]),
        "tau": median([run["tau"] for run in runs]),
        "first_token": quantiles([one.first_token or 0.0 for one in line]),
        "gaps": quantiles([gap for one in line for gap in one.gaps()]),
        "decode": quantiles([one.decode_time for one in line]),
        "queue": quantiles([(one.request.started or math.nan) - one.request.arrival for one in line]),
        "dispatches": len(host) / len(runs),
        "host_ms": median(host),
        "tokens": runs[0]["tokens"],
        "runs": [run["tokens"] / run["seconds"] for run in runs],
    }


def check_outputs(pair: Pair, methods: Sequence[Method], prompts: Prompts, capacity: int) -> int:
    """Serves prompts together, plainly and with each method; the tokens compared with those of each alone.

    Raises:
        RuntimeError: A method gives other tokens.
    """
    rng, compared, expected = np.random.default_rng(0), 0, []
    for method in (PLAIN_METHOD, *methods):
        load = _load(pair, method, len(prompts), capacity, _CHECKED_NODES)
        if not expected:
            for number, (prompt, params) in enumerate(prompts):
                alone = load.request(prompt, params)
                alone.request.cache_salt = str(number)
                load.serve([alone], 1)
                expected.append(alone.request.tokens)
        due = poisson(50.0, len(prompts), rng)
        line = [load.request(prompt, params, at) for at, (prompt, params) in zip(due, prompts, strict=True)]
        load.serve(line)
        load.close()
        for (prompt, params), one, tokens in zip(prompts, line, expected, strict=True):
            compared += len(tokens)
            difference = first_divergence(pair.target, prompt, params, one.request.tokens, tokens)
            if difference is not None and not difference.is_tie:
                raise RuntimeError(f"{method.name} does not give plain decoding's tokens: {difference}")
    return compared
