"""``python -m bench kernel --operation matmul``: matrix products of few rows, per format of the weights.

Every output is compared with float64: its error is divided by the sum of its terms' magnitudes. If all
comparisons pass, products are timed beside XLA's product of the same weights. A product's floor is reading
its stored weights once.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.common.comparison import all_right, find_shapes, notes_of, report_of, tables_of
from bench.common.floors import Ceilings, measure_ceilings
from bench.common.programs import time_together
from bench.common.report import check_report, measured_on, opening_of, publish
from bench.common.timing import on_gpu
from bench.matmul.cases import Case, calls_of, chain, product_by, random_rows, random_weights, work_of
from bench.matmul.check import MatmulCheck, check_products
from bench.matmul.tune import TUNED, tune_products
from pallas_kernels.matmul import implementations
from pallas_kernels.matmul.api import OPERATION
from pallas_kernels.matmul.shapes import SHAPES, MatmulShape

#: The keys of a row that are printed.
SHOWN = ("stored", "rows", "us", "floor_us", "times_floor", "wall_us", "xla_us", "times_faster")


def run(arguments: argparse.Namespace) -> int:
    """Compares, measures, prints the tables, and writes the JSON and the plot; or tunes."""
    shapes = _shapes(arguments)
    arguments.json = arguments.json or Path(f"results/matmul{'-tuning' if arguments.tune else ''}.json")
    check_report(arguments)
    cases = [
        Case(shape, stored, rows)
        for shape in shapes
        for stored in _formats(shape, arguments)
        for rows in arguments.rows or shape.rows
    ]
    if arguments.tune:
        return tune_products(
            cases,
            limit_seconds=arguments.limit_seconds,
            again=arguments.again,
            table_path=arguments.table or TUNED,
            json_path=arguments.json,
            opening=opening_of("kernel", arguments),
        )
    checks: list[MatmulCheck] = []
    for shape in shapes:
        for stored in _formats(shape, arguments):
            for dtype in arguments.dtypes:
                counts, name = arguments.rows or shape.rows, arguments.implementation
                checks += check_products(shape, stored, jnp.dtype(dtype), counts, name, arguments.seed)
    if not all_right(arguments, checks):
        return 1
    dtype = jnp.dtype(arguments.dtypes[0])
    ceilings = measure_ceilings(dtype, arguments.repeats)
    names = list(dict.fromkeys([arguments.implementation, "xla"]))
    rows = [_time(case, dtype, names, arguments.repeats, ceilings) for case in cases]
    report = report_of(arguments, "matmul", ceilings, [check._asdict() for check in checks], rows)
    worst = max(check.error for check in checks)
    errors = f"error of an output, divided by the sum of its terms' magnitudes: {worst:.1e}"
    notes = notes_of(report, "float64", errors, "call of a chain", "stored weights, rows and outputs")
    title = f"matrix products by {arguments.implementation}, {measured_on(report)}"
    publish(arguments, report, tables_of(rows, SHOWN), notes, title=title)
    return 0


def _formats(shape: MatmulShape, arguments: argparse.Namespace) -> Sequence[str]:
    """The formats of a shape's weights to measure."""
    return [stored for stored in shape.stored if arguments.weights in (None, stored)]


def _shapes(arguments: argparse.Namespace) -> list[MatmulShape]:
    """Checks the arguments; returns the shapes.

    Raises:
        ValueError: An argument is out of range or belongs to another operation, or the implementation cannot
            run.
    """
    shapes = find_shapes(arguments, SHAPES, [shape.name for shape in SHAPES], implementations())
    if arguments.prefixes or arguments.batch != 1 or arguments.baselines is not None:
        raise ValueError("--operation matmul has no --prefixes, --batch and --baselines")
    name = "pallas_triton" if arguments.tune else arguments.implementation
    try:
        OPERATION.check(name)
    except NotImplementedError as error:
        raise ValueError(f"{name}: {error}") from None
    if not any(_formats(shape, arguments) for shape in shapes):
        raise ValueError(f"--weights {arguments.weights}: none of the shapes has such")
    return shapes


def _time(
    case: Case, dtype: jnp.dtype, names: Sequence[str], repeats: int, ceilings: Ceilings
) -> dict[str, Any]:
    """Times a case by several implementations, the measured one first; returns its row."""
    calls = calls_of(case.shape, case.stored) if on_gpu() else 2
    weights = random_weights(case.shape, case.stored, dtype, calls)
    x = random_rows(np.random.default_rng(case.rows), case.rows, case.shape.depth, dtype)
    jobs = [(partial(chain, product_by(name)), (x, weights)) for name in names]
    found = time_together(jobs, [calls] * len(jobs), [None] * len(jobs), repeats, f"time {case}")
    times = dict(zip(names, found, strict=True))
    measured, work = times[names[0]], work_of(case)
    floor = 1e6 * ceilings.seconds(work)
    return {
        "shape": case.shape.name,
        "stored": case.stored,
        "rows": case.rows,
        "us": measured.micros,
        "wall_us": measured.wall,
        "kernels": measured.kernels,
        "xla_us": times["xla"].micros,
        **work._asdict(),
        "floor_us": floor,
        "times_floor": measured.micros / floor,
        "times_faster": times["xla"].micros / measured.micros,
    }
