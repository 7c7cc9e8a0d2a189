"""``python -m bench kernel --operation matmul --tune``: the fastest configurations, and XLA's time.

They become entries of `pallas_kernels/matmul/tuned.json`. These decide the default implementation of products
of these shapes on that kind of device.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.common.programs import UNCOMPILABLE, Program, compile_together, kernel_micros
from bench.common.report import show, write_report
from bench.common.tuned import Entry, read_table, write_table
from bench.matmul.cases import SPEC, Case, calls_of, chain, product_by, random_rows, random_weights
from bench.matmul.check import judge
from jetspec_jax.progress import Progress
from pallas_kernels.matmul import config as matmul_config
from pallas_kernels.matmul import pallas_triton
from pallas_kernels.matmul.config import Config, default_config

TUNED = Path(matmul_config.__file__).with_name("tuned.json")
# Shared memory of the GPUs that are tuned for.
_MOST_BYTES = 200 << 10

#: Microseconds of each configuration, None if it does not run or is wrong, and of XLA's product.
Score = Callable[[Case, Sequence[Config]], tuple[list[float | None], float]]


def candidates(case: Case) -> list[Config]:
    """The rule's configuration, then all whose tiles fit into shared memory and registers."""
    sizes = case.stored, case.rows, case.shape.depth, case.shape.columns
    rule = default_config(*sizes)
    found = [rule]
    itemsize = {"plain": 2, "fp8": 1, "mxfp4": 0.5}[case.stored]
    shares = dict.fromkeys((1, rule.splits, 2 * rule.splits))
    tiles = itertools.product((32, 64, 128), (64, 128), shares, (4, 8), (3, 5))
    for columns, depth, splits, warps, stages in tiles:
        config = Config(rule.block_rows, columns, depth, splits, warps, stages)
        # Rows have 16 bits. Weights are loaded as stored, and a 16-bit copy of one tile is multiplied.
        step = depth * (2 * config.block_rows + itemsize * columns)
        fits = stages * step + 2 * depth * columns <= _MOST_BYTES
        if fits and config.block_rows * columns <= 128 * 32 * warps and config != rule:
            found.append(config)
    return found


def tune_products(
    cases: Sequence[Case],
    *,
    limit_seconds: float,
    again: bool,
    table_path: Path,
    json_path: Path,
    opening: Mapping[str, Any],
    score: Score | None = None,
) -> int:
    """Tunes cases; returns the exit code. Each entry is written as soon as it is found.

    Args:
        cases: The products.
        limit_seconds: The time limit; entries found before it are kept.
        again: Whether to tune cases that have an entry.
        table_path: The file of entries.
        json_path: The report's path.
        opening: The report's first keys.
        score: Times configurations; tests pass a function that needs no GPU.
    """
    started, kind = time.monotonic(), jax.devices()[0].device_kind
    known = {_key_of(entry) for entry in read_table(table_path).get(kind, [])}
    todo = [case for case in cases if again or _key(case) not in known]
    rows: list[dict[str, Any]] = []
    remaining = list(todo)
    for case in Progress(todo, desc="tune", unit="entry"):
        if time.monotonic() - started > limit_seconds:
            break
        remaining.remove(case)
        configs = candidates(case)
        micros, xla = (score or _score_on_gpu)(case, configs)
        ran = [(taken, i) for i, taken in enumerate(micros) if taken is not None]
        if not ran:
            Progress.write(f"no configuration runs: {case}")
            continue
        best, i = min(ran)
        added: Entry = {**_named(case), "micros": best, "xla_micros": xla, "config": asdict(configs[i])}
        # Read again: another run may have added entries of other shapes.
        table = read_table(table_path)
        kept = [entry for entry in table.get(kind, []) if _key_of(entry) != _key(case)]
        write_table(table_path, {**table, kind: sorted([*kept, added], key=_key_of)})
        rows.append({**added, "shape": case.shape.name, "tried": len(ran)})
    if rows:
        show("Tuned", [{key: value for key, value in row.items() if key != "config"} for row in rows])
        write_report(json_path, {**opening, "benchmark": "matmul, tuning", "rows": rows})
    for case in remaining:
        print(f"remains: {case}")
    return 0


def _score_on_gpu(case: Case, configs: Sequence[Config]) -> tuple[list[float | None], float]:
    dtype, calls = jnp.dtype(jnp.bfloat16), calls_of(case.shape, case.stored)
    weights = random_weights(case.shape, case.stored, dtype, calls)
    x = random_rows(np.random.default_rng(0), case.rows, case.shape.depth, dtype)
    runs = [product_by("xla")]
    runs += [partial(pallas_triton.matmul, spec=SPEC, wide=False, config=config) for config in configs]
    jobs = [(partial(chain, run), (x, weights)) for run in runs]
    programs: dict[int, Program] = {}
    expected = np.zeros(())
    for i, compiled in enumerate(compile_together(jobs, lambda: None)):
        if isinstance(compiled, Exception):
            continue
        program = Program(compiled, (x, weights), calls)
        try:
            out = np.asarray(program.warm_up()[0], np.float64)
        except UNCOMPILABLE:
            continue
        if i == 0:
            expected = out
        # The sum of the terms' magnitudes exceeds every output: the terms' signs are random.
        elif (problem := judge(out, out, expected, np.full_like(out, 4 * np.abs(expected).max())))[1]:
            Progress.write(f"WRONG RESULT, not used: {configs[i - 1]}: {problem[1]}")
            continue
        programs[i] = program
    micros = dict(zip(programs, kernel_micros(list(programs.values()), None), strict=True))
    sums = {i: sum(kernels.values()) for i, kernels in micros.items()}
    return [sums.get(i + 1) for i in range(len(configs))], sums[0]


def _named(case: Case) -> Entry:
    shape = case.shape
    return {"stored": case.stored, "depth": shape.depth, "columns": shape.columns, "rows": case.rows}


def _key(case: Case) -> tuple[Any, ...]:
    return tuple(_named(case).values())


def _key_of(entry: Entry) -> tuple[Any, ...]:
    return tuple(entry[name] for name in ("stored", "depth", "columns", "rows"))
