"""``python -m bench kernel``: compares one layer's tree attention with its reference, and times it.

``--operation experts`` does the same for a mixture of experts (`bench.experts`), ``--operation matmul`` for
matrix products of few rows (`bench.matmul`).

Every registered shape is compared with the XLA reference in float32, for many block sizes and prefix lengths,
with random trees, and with NaN in all that must not be read. If all comparisons pass, a layer is timed beside
the reference. Its floor is the bytes it must move at the device's measured bandwidth, or the operations it
must compute at the measured matmul rate, whichever takes longer.
"""

import argparse
import secrets
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench.common.comparison import TOLERANCES, all_right, find_shapes, notes_of, report_of, tables_of
from bench.common.floors import measure_ceilings
from bench.common.options import add_switch
from bench.common.report import check_report, measured_on, opening_of, publish
from bench.experts import command as experts
from bench.experts.cases import STORED
from bench.kernel.cases import attend_by, ragged_call
from bench.kernel.check import ROWS, AttentionCheck, checks_of, run_checks
from bench.kernel.report import SHOWN, row_of
from bench.kernel.speed import AttentionCase, time_shape
from bench.kernel.tuning_run import TUNED, tune
from bench.matmul import command as matmul
from pallas_kernels.tree_attention import implementations
from pallas_kernels.tree_attention.shapes import SHAPES, AttentionShape

# Prefix lengths that a configuration is tuned for.
TUNING_PREFIXES = (1024, 8192, 32768)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    names = ", ".join(shape.name for shape in SHAPES)
    add = parser.add_argument
    add(
        "--operation",
        default="tree_attention",
        choices=["tree_attention", "experts", "matmul"],
        help="what to measure",
    )
    others = ", ".join(shape.name for shape in experts.SHAPES)
    products = ", ".join(shape.name for shape in matmul.SHAPES)
    add(
        "--shapes",
        nargs="+",
        help=f"among {names} (default: all); for experts: {others}; for matmul: {products}",
    )
    add("--rows", type=int, nargs="+", help="rows per block (default: each shape's, and more to compare)")
    add("--prefixes", type=int, nargs="+", help="committed tokens (default: each shape's)")
    add("--batch", type=int, default=1, help="sequences of a timed call (default: 1)")
    add(
        "--dtypes",
        nargs="+",
        default=list(TOLERANCES),
        help="types that are compared; the first is timed (default: both)",
    )
    add("--implementation", default="pallas_triton", help=f"one of {', '.join(implementations())}")
    baselines = f"baselines of experts among {', '.join(experts.BASELINES)} (default: the first two)"
    add("--baselines", nargs="*", help=baselines)
    add(
        "--weights",
        help=f"format of the weights: {', '.join(STORED)}; for matmul fp8_rows too, whose rows are also "
        "quantised (default: plain for --operation experts, all for matmul)",
    )
    add("--repeats", type=int, default=5, help="timings by the host's clock, interleaved (default: 5)")
    add("--seed", type=int, help="seed of the comparisons (default: random; the report has it)")
    paths = "results/kernel.json, experts.json or matmul.json; with --tune [matmul-]tuning.json"
    add("--json", type=Path, help=f"path of the report (default: {paths})")
    add(
        "--plot",
        type=Path,
        help="path of the picture, an SVG (default: beside the report)",
    )
    add_switch(parser, "--tune", "search for the best configurations instead, on a GPU; not for experts")
    add(
        "--limit-seconds",
        type=float,
        default=480,
        help="with --tune: stop the search after this time (default: 480)",
    )
    add_switch(parser, "--again", "with --tune: also tune what has an entry")
    add("--table", type=Path, help="with --tune: the file of entries (default: the package's)")


def run(arguments: argparse.Namespace) -> int:
    """Compares, measures, prints the table, and writes the JSON and the plot; or tunes."""
    if arguments.seed is None:
        arguments.seed = secrets.randbits(32)
    if arguments.operation == "experts":
        arguments.weights = arguments.weights or "plain"
        return experts.run(arguments)
    if arguments.operation == "matmul":
        return matmul.run(arguments)
    if arguments.weights:
        raise ValueError("--weights is for --operation experts and matmul")
    shapes = _shapes(arguments)
    arguments.json = arguments.json or Path(f"results/{'tuning' if arguments.tune else 'kernel'}.json")
    check_report(arguments)
    if arguments.tune:
        return tune(
            shapes,
            arguments.dtypes,
            arguments.rows,
            arguments.prefixes or TUNING_PREFIXES,
            limit_seconds=arguments.limit_seconds,
            again=arguments.again,
            table_path=arguments.table or TUNED,
            json_path=arguments.json,
            opening=opening_of("kernel", arguments),
        )
    checks: list[AttentionCheck] = []
    for i, shape in enumerate(shapes):
        rows, prefixes = arguments.rows or ROWS, arguments.prefixes or shape.prefixes
        planned = list(checks_of(shape, arguments.dtypes, rows, prefixes))
        checks += run_checks(planned, arguments.implementation, arguments.seed + i, f"check {shape.name}")
    if not all_right(arguments, checks):
        return 1

    dtype = arguments.dtypes[0]
    ceilings = measure_ceilings(jnp.dtype(dtype), arguments.repeats)
    rows, names = [], list(dict.fromkeys([arguments.implementation, "xla"]))
    for shape in shapes:
        cases = [
            AttentionCase(shape, count, prefix, arguments.batch, dtype)
            for count in arguments.rows or shape.rows
            for prefix in arguments.prefixes or shape.prefixes
        ]
        times = time_shape(cases, names, arguments.repeats)
        for case in cases:
            rows.append(row_of(case, names[0], times[case, names[0]], times[case, "xla"], ceilings))
    entries = [
        {**check._asdict(), "shape": check.shape.name, "tolerance": TOLERANCES[check.dtype]}
        for check in checks
    ]
    worst = ", ".join(
        f"{max(check.relative_error for check in checks if check.dtype == name):.1e} in {name} "
        f"({TOLERANCES[name]:.0e} allowed)"
        for name in arguments.dtypes
    )
    report = report_of(arguments, "kernel", ceilings, entries, rows)
    errors = f"relative error of a row: {worst}"
    moved = "keys, values, queries and output moved once"
    notes = notes_of(report, "the reference in float32", errors, "layer", moved)
    title = f"tree attention by {arguments.implementation}, batch {arguments.batch}, {measured_on(report)}"
    publish(arguments, report, tables_of(rows, SHOWN), notes, title=title)
    return 0


def _shapes(arguments: argparse.Namespace) -> list[AttentionShape]:
    """Checks the arguments; returns the shapes.

    Raises:
        ValueError: An argument is out of range, or the implementation cannot run here.
    """
    if arguments.baselines is not None:
        raise ValueError("--baselines is for --operation experts: tree attention is timed beside xla")
    shapes = find_shapes(arguments, SHAPES, [shape.name for shape in SHAPES], implementations())
    for option in ("rows", "prefixes", "dtypes"):
        # Without repetitions, in the given order.
        if getattr(arguments, option):
            setattr(arguments, option, list(dict.fromkeys(getattr(arguments, option))))
    name = "pallas_triton" if arguments.tune else arguments.implementation
    for shape in shapes:
        call = ragged_call(np.random.default_rng(0), shape, 1, (1,), np.dtype(np.float32))
        try:
            # Tracing is enough: an implementation raises for unsupported cases before it computes anything.
            jax.eval_shape(attend_by(shape, name), call)
        except NotImplementedError as error:
            raise ValueError(f"--implementation {name}: {error}") from None
    return shapes
