"""``python -m bench kernel --operation matmul --tune``: the fastest configurations, and XLA's time.

They become entries of `pallas_kernels/matmul/tuned.json`. These decide the default implementation of products
of these shapes on that kind of device.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.common.programs import UNCOMPILABLE, Program, compile_together, kernel_micros
from bench.common.report import show, write_report
from bench.common.tuned import Entry, has_entry, keep
from bench.matmul.cases import SPEC, Case, calls_of, chain, product_by, random_rows, random_weights
from bench.matmul.check import judge
from jetspec_jax.progress import Progress
from pallas_kernels.matmul import config as matmul_config
from pallas_kernels.matmul import pallas_mosaic, pallas_triton
from pallas_kernels.matmul.config import CONFIGS, Config, MosaicConfig, default_config

TUNED = Path(matmul_config.__file__).with_name("tuned.json")
# Shared memory of the GPUs that are tuned for.
_MOST_BYTES = 200 << 10
# Sums of a thread.
_MOST_ACCUMULATORS = 128
# About one, two and three programs for each of their processors; each has at least so many steps.
_PROGRAMS = (132, 264, 396)
_FEWEST_STEPS = 3

_KERNELS = {"pallas_mosaic": pallas_mosaic.matmul, "pallas_triton": pallas_triton.matmul}

#: Microseconds of each configuration, None if it does not run or is wrong, and of XLA's product.
Score = Callable[[Case, Sequence[Config | MosaicConfig]], tuple[list[float | None], float]]


def candidates(case: Case) -> list[Config | MosaicConfig]:
    """The rule's configuration, then all whose tiles fit into shared memory and registers."""
    shape = case.shape
    rule = default_config(case.stored, case.rows, shape.depth, shape.columns)
    itemsize = {"plain": 2, "fp8": 1, "fp8_rows": 1, "mxfp4": 0.5}[case.stored]
    row_itemsize = 1 if case.stored == "fp8_rows" else 2
    found: list[Config | MosaicConfig] = [rule, *_of_mosaic(case)]
    for (rows, columns, warps), depth, stages in itertools.product(_tiles(case), (64, 128), (3, 4)):
        # Weights are loaded as stored; where products read wider ones from shared memory, a 16-bit copy of
        # one tile lies there too.
        copied = case.stored != "fp8_rows" and (case.stored != "fp8" or rows >= 64)
        loaded = (stages - 1) * depth * (row_itemsize * rows + itemsize * columns)
        if loaded + copied * 2 * depth * columns > _MOST_BYTES:
            continue
        programs = -(-shape.columns // columns) * -(-case.rows // rows)
        most = max(1, shape.depth // depth // _FEWEST_STEPS)
        shares = (min(most, max(1, round(count / programs))) for count in _PROGRAMS)
        found += [Config(rows, columns, depth, n, warps, stages) for n in shares]
    return list(dict.fromkeys(found))


def _tiles(case: Case) -> Iterator[tuple[int, int, int]]:
    """Rows and columns of a program, and its warps."""
    rows = min(128, max(16, 1 << (case.rows - 1).bit_length()))
    if case.stored != "fp8":
        for columns, warps in itertools.product((64, 128), (4, 8)):
            if rows * columns <= _MOST_ACCUMULATORS * 32 * warps:
                yield rows, columns, warps
        return
    yield min(rows, 64), 128, 4
    if rows == 128:
        yield rows, 128, 8


def _of_mosaic(case: Case) -> Iterator[MosaicConfig]:
    """Those of the Mosaic kernel: about one and two items of work for each processor, and whole sums."""
    if case.stored != "fp8_rows":
        return
    for groups in (2, 3):
        tiles, rest = divmod(case.shape.columns, groups * 64)
        if rest == 0:
            for splits in dict.fromkeys((1, *(max(1, count // tiles) for count in (132, 264)))):
                yield MosaicConfig(groups, splits)


def _name_of(config: Config | MosaicConfig) -> str:
    """The implementation that a configuration is of."""
    return next(name for name, kind in CONFIGS.items() if isinstance(config, kind))


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
    todo = [case for case in cases if again or not has_entry(table_path, kind, _key(case))]
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
        times = {"implementation": _name_of(configs[i]), "micros": best, "xla_micros": xla}
        added = {**times, "config": asdict(configs[i])}
        keep(table_path, kind, _key(case), added)
        rows.append({**_key(case), **added, "shape": case.shape.name, "tried": len(ran)})
    if rows:
        show("Tuned", [{key: value for key, value in row.items() if key != "config"} for row in rows])
        write_report(json_path, {**opening, "benchmark": "matmul, tuning", "rows": rows})
    for case in remaining:
        print(f"remains: {case}")
    return 0


def _score_on_gpu(case: Case, configs: Sequence[Config | MosaicConfig]) -> tuple[list[float | None], float]:
    dtype, calls = jnp.dtype(jnp.bfloat16), calls_of(case.shape, case.stored)
    weights = random_weights(case.shape, case.stored, dtype, calls)
    x = random_rows(np.random.default_rng(0), case.rows, case.shape.depth, dtype)
    runs = [product_by("xla")]
    runs += [partial(_KERNELS[_name_of(own)], spec=SPEC, wide=False, config=own) for own in configs]
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


def _key(case: Case) -> Entry:
    shape = case.shape
    return {"stored": case.stored, "depth": shape.depth, "columns": shape.columns, "rows": case.rows}
