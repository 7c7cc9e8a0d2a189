"""``python -m bench kernel --tune``: searches for the best configurations, and keeps each at once."""

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
from bench.common.tuned import has_entry, keep
from bench.kernel.cases import Attend, AttentionCall, attend_by, chain, layer_call, layer_tables, random_pool
from bench.kernel.speed import KERNELS, AttentionCase, pages_read, work_of
from bench.kernel.tuning import OutOfTime, Score, Task, search, tasks_of
from jetspec_jax.progress import Progress
from pallas_kernels.tree_attention import PagedPrefix, config, pallas_triton
from pallas_kernels.tree_attention.shapes import AttentionShape

TUNED = Path(config.__file__).with_name("tuned.json")
# Layers per chain: at 1,024 tokens their keys and values exceed an H200's L2 cache.
LAYERS = 32
# The most configurations per task in the report.
LISTED = 10

#: Makes the scoring function of a task and its prefixes.
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
    """Tunes the tasks of some shapes; returns the exit code.

    Args:
        dtypes: The types of the inputs.
        rows: N; None is each shape's default.
        prefixes: The prefix lengths that a configuration is scored on.
        limit_seconds: The time limit; entries found before it are kept.
        again: Whether to tune tasks that have an entry.
        table_path: The file of entries.
        json_path: The report's path.
        opening: The report's first keys.
        make_score: Makes scoring functions; tests pass one that needs no GPU.
    """
    started = time.monotonic()
    device = jax.devices()[0]
    # An H200's number, if the device does not report it.
    multiprocessors = int(getattr(device, "core_count", 132))
    tasks = tasks_of(shapes, dtypes, rows)
    todo = [task for task in tasks if again or not has_entry(table_path, device.device_kind, task.key)]
    if len(todo) < len(tasks):
        print(f"{len(tasks) - len(todo)} of {len(tasks)} entries are there already; --again tunes them again")
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
        keep(table_path, device.device_kind, task.key, {"config": asdict(ranking[0][1])})
        results.append(_result(task, ranking, len(prefixes)))
    if results:
        shown = [
            {key: row[key] for key in ("dtype", "head size", "rows", "x floor", "tried")} for row in results
        ]
        best = [row["ranking"][0]["config"] for row in results]
        show("Tuned", [{**row, **settings} for row, settings in zip(shown, best, strict=True)])
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
        "ranking": [{"x floor": score / timed, "config": asdict(entry)} for score, entry in ranking[:LISTED]],
    }


def _scores_on_gpu(dtypes: Sequence[str]) -> MakeScore:
    ceilings = {dtype: measure_ceilings(jnp.dtype(dtype), repeats=3) for dtype in dtypes}
    return lambda task, prefixes: score_of(task, prefixes, ceilings[task.dtype])


def score_of(task: Task, prefixes: Sequence[int], ceilings: Ceilings) -> Score:
    """Times a task's configurations on the GPU; the score of one that fails or is wrong is infinity."""
    calls = [_Inputs(shape, rows, task.dtype, sorted(prefixes), ceilings) for shape, rows in task.calls]
    return lambda configs: np.sum([call.score(configs) for call in calls], axis=0).tolist()


class _Inputs:
    """A chain of one shape and number of rows, whose tables hold the longest prefix.

    One program serves all prefixes, because tables and lengths are its arguments.
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
        # A kernel's time is rarely below twice its floor.
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
        jobs = [(partial(chain, self._attend(candidate)), self._arguments[0]) for candidate in configs]
        programs: dict[int, list[Program]] = {}
        for i, compiled in enumerate(compile_together(jobs, lambda: None)):
            if isinstance(compiled, Exception):
                Progress.write(f"does not compile: {configs[i]}: {_first_line(compiled)}")
            elif self._is_right(compiled, configs[i]):
                programs[i] = [
                    Program(compiled, arguments, LAYERS, dispatches)
                    for arguments, dispatches in zip(self._arguments, self._dispatches, strict=True)
                ]
        flat = [program for by_prefix in programs.values() for program in by_prefix]
        micros = iter([sum(found.values()) for found in kernel_micros(flat, KERNELS["pallas_triton"])])
        scores = [float("inf")] * len(configs)
        for i in programs:
            scores[i] = sum(next(micros) / floor for floor in self._floors)
        return scores

    def _attend(self, candidate: config.Config) -> Attend:
        def attend(call: AttentionCall) -> jax.Array:
            return pallas_triton.tree_attention(
                *call[:5],
                scale=self._shape.head_size**-0.5,
                window=self._shape.window,
                depths=call.depths,
                sinks=call.sinks,
                config=candidate,
            )

        return attend

    def _is_right(self, compiled: Callable[..., Any], candidate: config.Config) -> bool:
        """Whether a program runs, and agrees with the reference at the shortest prefix."""
        try:
            out = np.asarray(compiled(*self._arguments[0]))
        except jax.errors.JaxRuntimeError as error:
            Progress.write(f"does not run: {candidate}: {_first_line(error)}")
            return False
        _, problem = compare_rows(out, out, self._expected, self._tolerance)
        if problem is not None:
            Progress.write(f"WRONG RESULT, not used: {candidate}: {problem}")
        return problem is None


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
