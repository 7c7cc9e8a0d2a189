"""``python -m bench startup``: seconds until an engine answers its first request, and until it is warm.

Time counts from when the models are on the device. The engine is a server's: it first compiles the programs
that can serve any request, and the others in the background. The first request arrives as soon as it can be
served.
"""

import argparse
import asyncio
import os
import time
from typing import Any

import jax

from bench.common.options import check_known, check_least
from bench.common.pair import random_pair
from bench.common.report import add_report_arguments, check_report, measured_on, opening_of, publish
from bench.common.shapes import SHAPES
from jetspec_jax import AsyncLLM, SamplingParams, enable_compilation_cache
from jetspec_jax.checkpoint.source import resolve_dtype
from jetspec_jax.cli.options import MODELS
from jetspec_jax.cli.server_options import ENGINE
from jetspec_jax.demo import DEMO
from jetspec_jax.progress import Progress

# Stages of compiling, which JAX reports by these events.
_STAGES = {
    "traced s": "/jax/core/compile/jaxpr_trace_duration",
    "lowered s": "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "compiled s": "/jax/core/compile/backend_compile_duration",
}
# Reported for each program that is read from the compilation cache.
_CACHED = "/jax/compilation_cache/cache_hits"
# Between two looks at the number of programs that are left.
_LOOKS_EVERY = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    shapes = (
        f'"{DEMO}", the embedded pair, or a shape of random weights: {", ".join(SHAPES)} (default: {DEMO})'
    )
    add("--shape", default=DEMO, help=shapes)
    usual = {"budget": 32, "dtype": "auto", "compilation_cache": "off"}
    MODELS.add(parser, ["algorithm", *usual], **usual)
    ENGINE.add(parser, ["max_slots", "capacity"], max_slots=16)
    add("--prompt-tokens", type=int, default=200, help="tokens of the first prompt (default: 200)")
    add("--max-tokens", type=int, default=64, help="tokens of the first answer (default: 64)")
    add_report_arguments(parser, "startup", picture=False)


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the table, and writes the JSON."""
    if arguments.shape != DEMO:
        check_known("shape", [arguments.shape], SHAPES)
    check_least(arguments, 1, "max_num_seqs", "prompt_tokens", "max_tokens")
    check_report(arguments)
    enable_compilation_cache(arguments.compilation_cache)
    stages = dict.fromkeys(_STAGES, 0.0)
    cached: list[str] = []

    def add_up(event: str, duration_secs: float, **_: Any) -> None:
        for name, stage in _STAGES.items():
            stages[name] += duration_secs if event == stage else 0.0

    def count(event: str, **_: Any) -> None:
        if event == _CACHED:
            cached.append(event)

    llm = _llm(arguments)
    jax.monitoring.register_event_duration_secs_listener(add_up)
    jax.monitoring.register_event_listener(count)
    try:
        times = asyncio.run(_measure(llm, arguments))
    finally:
        jax.monitoring.unregister_event_duration_listener(add_up)
        jax.monitoring.unregister_event_listener(count)
    report = {
        **opening_of("startup", arguments),
        "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "dtype": str(llm.llm.target.dtype),
        "algorithm": str(llm.llm.settings.algorithm),
        "seconds": times,
        "seconds_of_stages": stages,
        "programs_from_cache": len(cached),
    }
    row = {**{f"{name} s": value for name, value in times.items()}, **stages}
    tables = [(f"{arguments.shape}, {measured_on(report)}", [row])]
    publish(arguments, report, tables, _NOTES)
    return 0


_NOTES = [
    "Seconds since the models were loaded: until any request can be served, until the first answer is whole, "
    "until all programs are compiled, and until a warm-up that waits for them returns.",
    "The stages are sums over all programs; tracing and lowering hold the interpreter, compiling does not.",
]


def _llm(arguments: argparse.Namespace) -> AsyncLLM:
    """The engine's owner, with its models on the device."""
    given = MODELS.given(arguments)  # also the options of `ENGINE`
    if arguments.shape == DEMO:
        return AsyncLLM(DEMO, **given)
    return AsyncLLM(*random_pair(arguments.shape, resolve_dtype(given.pop("dtype"))), **given)


async def _measure(llm: AsyncLLM, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds until each event of a start."""
    started, times = time.perf_counter(), {}

    def reached(event: str) -> None:
        times.setdefault(event, time.perf_counter() - started)

    async with llm:
        await llm.warm_up(background=True)
        reached("opens")
        params = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
        async for _ in llm.generate([7] * arguments.prompt_tokens, params):
            reached("first token")
        reached("first answer")
        most = llm.stats().programs_left
        with Progress(total=most, desc="compile", unit="program") as bar:
            while left := llm.stats().programs_left:
                bar.update(most - left - bar.n)
                await asyncio.sleep(_LOOKS_EVERY)
            bar.update(most - bar.n)
        reached("all programs")
        await llm.warm_up()
        reached("warm")
    return times
