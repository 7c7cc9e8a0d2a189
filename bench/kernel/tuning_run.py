"""``python -m bench kernel --tune``: searches for the best configurations and keeps them as it goes."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.common.comparison import TOLERANCES, compare_rows
from bench.common.floors import Ceilings, measure_ceilings
from bench.common.programs import BURST_SECONDS, MOST_DISPATCHES, Program, compile_together, kernel_micros
from bench.common.report import show, write_report
from bench.kernel.cases import Attend, AttentionCall, attend_by, chain, layer_call, layer_tables, random_pool
from bench.kernel.speed import KERNELS, AttentionCase, pages_read, work_of
from bench.kernel.tuning import (
    OutOfTime,
    Score,
    Task,
    has_entry,
    read_table,
    search,
    tasks_of,
    with_entry,
    write_table,
)
from jetspec_jax.progress import Progress
from pallas_kernels.tree_attention import PagedPrefix, config, pallas_triton
from pallas_kernels.tree_attention.shapes import AttentionShape

TUNED = Path(config.__file__).with_name("tuned.json")
# Layers of a chain: at 1,024 tokens their keys and values are more than an H200's second-level cache holds.
LAYERS = 32
# Configurations of a task that the report lists.
LISTED = 10

#: Makes what times the configurations of a task; its arguments are the task and the prefixes.
MakeScore = Callable[[Task, Sequence[int]], Score]


def tune(
    shapes: Sequence[AttentionShape],
    dtypes: Sequence[str],
    rows: Sequence[int] | None,
    prefixes: Sequence[int],
    *,
    limit_seconds: float,
    again: bool,
    table_path: Path,
    json_path: Path,
    opening: Mapping[str, Any],
    make_score: MakeScore | None = None,
) -> int:
    """Tunes all kinds of calls of some shapes that have no entry yet; returns the exit code.

    Args:
        shapes: The shapes.
        dtypes: Of the inputs.
        rows: N; None for each shape's own.
        prefixes: Committed tokens that a configuration must be good at.
        limit_seconds: After that no more is tried; the entries so far are kept.
        again: Also what has an entry.
        table_path: Where entries are kept.
        json_path: Where the report goes.
        opening: What the report begins with.
        make_score: Stands in for the GPU in tests.
    """
    started = time.monotonic()
    device = jax.devices()[0]
    # As many as an H200 has, where the device does not tell.
    multiprocessors = int(getattr(device, "core_count", 132))
    tasks = tasks_of(shapes, dtypes, rows)
    table = read_table(table_path)
    todo = [task for task in tasks if again or not has_entry(table, device.device_kind, task)]
    if len(todo) < len(tasks):
        print(f"{len(tasks) - len(todo)} of {len(tasks)} entries are there already; --again tunes them anew")
    make_score = make_score or _scores_on_gpu(dtypes)
    results: list[dict[str, Any]] = []
    remaining = list(todo)
    for task in Progress(todo, desc="tune", unit="entry"):
        Progress.write(f"tuning {task}")
        try:
            ranking = search(task, make_score(task, prefixes), multiprocessors, started + limit_seconds)
        except OutOfTime:
            break
        remaining.remove(task)
        if not ranking:
            Progress.write(f"no configuration runs: {task}")
            continue
        # What is on disk may have grown since: another run may tune other shapes.
        table = with_entry(read_table(table_path), device.device_kind, task, ranking[0][1])
        write_table(table_path, table)
        results.append(_result(task, ranking, len(prefixes)))
    if results:
        shown = [
            {key: row[key] for key in ("dtype", "head size", "rows", "x floor", "tried")} for row in results
        ]
        best = [row["ranking"][0]["config"] for row in results]
        show("Tuned", [{**row, **own} for row, own in zip(shown, best, strict=True)])
        settings = {"prefixes": list(prefixes), "multiprocessors": multiprocessors}
        write_report(json_path, {**opening, "benchmark": "kernel --tune", **settings, "tasks": results})
        print(f"wrote {table_path}")
    for task in remaining:
        print(f"remains: {task}")
    return 0


def _result(task: Task, ranking: Sequence[tuple[float, Any]], prefixes: int) -> dict[str, Any]:
    timed = prefixes * len(task.calls)
    return {
        "dtype": task.dtype,
        "head size": task.head_size,
        "rows": task.rows,
        "calls": [{"shape": shape.name, "rows": rows} for shape, rows in task.calls],
        "x floor": ranking[0][0] / timed,
        "tried": len(ranking),
        "ranking": [{"x floor": score / timed, "config": asdict(own)} for score, own in ranking[:LISTED]],
    }


def _scores_on_gpu(dtypes: Sequence[str]) -> MakeScore:
    ceilings = {dtype: measure_ceilings(jnp.dtype(dtype), repeats=3) for dtype in dtypes}
    return lambda task, prefixes: Scorer(task, prefixes, ceilings[task.dtype])


class Scorer:
    """Times the configurations of a task on the GPU."""

    def __init__(self, task: Task, prefixes: Sequence[int], ceilings: Ceilings):
        """Makes the inputs, and what the results must be at the shortest prefix."""
        self._calls = [
            _Inputs(shape, rows, task.dtype, sorted(prefixes), ceilings) for shape, rows in task.calls
        ]

    def __call__(self, configs: Sequence[config.Config]) -> list[float]:
        """Sums of seconds over seconds at the floor; infinity for what does not compile, run or compute."""
        return np.sum([call.score(configs) for call in self._calls], axis=0).tolist()


class _Inputs:
    """One shape and number of rows: a chain whose tables hold the longest prefix, for all prefixes.

    One program serves them all, because the tables and the length are values.
    """

    def __init__(
        self, shape: AttentionShape, rows: int, dtype: str, prefixes: Sequence[int], ceilings: Ceilings
    ):
        self._shape, self._tolerance = shape, TOLERANCES[dtype]
        cases = [AttentionCase(shape, rows, prefix, 1, dtype) for prefix in prefixes]
        steps = [pages_read(case, "pallas_triton") for case in cases]
        pages = max(case.pages for case in cases)
        num_pages = max(4 * pages, LAYERS * min(steps))
        pool = random_pool(shape, num_pages, jnp.dtype(dtype))
        self._floors = [1e6 * ceilings.seconds(work_of(case)) for case in cases]
        # A kernel is rarely faster than twice its floor.
        bursts = [round(5e5 * BURST_SECONDS / (LAYERS * floor)) for floor in self._floors]
        self._dispatches = [max(1, min(MOST_DISPATCHES, burst)) for burst in bursts]
        self._arguments = []
        for case, step in zip(cases, steps, strict=True):
            tables = layer_tables(num_pages, LAYERS, 1, pages, step)
            prefix = PagedPrefix(*pool, tables[0], jnp.full(1, case.prefix, jnp.int32))
            call = layer_call(np.random.default_rng(0), shape, case.block, prefix, jnp.dtype(dtype))
            self._arguments.append((call, tables))
        call, tables = self._arguments[0]
        short = tables[:, :, : cases[0].pages]
        call = call._replace(prefix=replace(call.prefix, block_tables=short[0]))
        self._expected = np.asarray(jax.jit(partial(chain, attend_by(shape, "xla")))(call, short), np.float32)

    def score(self, configs: Sequence[config.Config]) -> list[float]:
        """Seconds over seconds at the floor, summed over the prefixes, for each configuration."""
        jobs = [(partial(chain, self._attend(own)), self._arguments[0]) for own in configs]
        programs: dict[int, list[Program]] = {}
        for i, compiled in enumerate(compile_together(jobs, lambda: None)):
            if isinstance(compiled, Exception):
                Progress.write(f"does not compile: {configs[i]}: {_first_line(compiled)}")
            elif self._is_right(compiled, configs[i]):
                programs[i] = [
                    Program(compiled, arguments, LAYERS, dispatches)
                    for arguments, dispatches in zip(self._arguments, self._dispatches, strict=True)
                ]
        flat = [program for own in programs.values() for program in own]
        micros = iter([sum(found.values()) for found in kernel_micros(flat, KERNELS["pallas_triton"])])
        scores = [float("inf")] * len(configs)
        for i in programs:
            scores[i] = sum(next(micros) / floor for floor in self._floors)
        return scores

    def _attend(self, own: config.Config) -> Attend:
        def attend(call: AttentionCall) -> jax.Array:
            return pallas_triton.tree_attention(
                *call[:5],
                scale=self._shape.head_size**-0.5,
                window=self._shape.window,
                depths=call.depths,
                sinks=call.sinks,
                config=own,
            )

        return attend

    def _is_right(self, compiled: Callable[..., Any], own: config.Config) -> bool:
        """Whether it runs, and computes at the shortest prefix what the reference does."""
        try:
            out = np.asarray(compiled(*self._arguments[0]))
        except jax.errors.JaxRuntimeError as error:
            Progress.write(f"does not run: {own}: {_first_line(error)}")
            return False
        _, problem = compare_rows(out, out, self._expected, self._tolerance)
        if problem is not None:
            Progress.write(f"WRONG RESULT, not used: {own}: {problem}")
        return problem is None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
