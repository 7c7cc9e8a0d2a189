"""Compares kernels with their references. Commands time a kernel only after this comparison."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from bench.common.floors import Ceilings
from bench.common.options import check_known, check_least
from bench.common.programs import UNCOMPILABLE, Job, compile_together
from bench.common.report import opening_of
from bench.common.timing import on_gpu
from jetspec_jax.progress import Progress

# Largest relative error of a row against the float32 reference. bfloat16 rounds the weights and the output
# to 8 bits, which is an error of about 3e-3.
TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-5}

#: The largest relative error of a row, and a description of the fault or None.
Verdict = tuple[float, str | None]


def compare_jobs(
    jobs: Sequence[Job], references: Sequence[Job], tolerances: Sequence[float], title: str
) -> list[Verdict]:
    """Runs each job twice and its reference once, and compares their results.

    Args:
        jobs: Programs whose results are compared, each [B, N, ...] or a matrix of rows.
        references: The float32 reference of each job.
        tolerances: The largest relative error of each job.
    """
    verdicts = []
    with Progress(total=3 * len(jobs), desc=title, unit="step") as bar:
        programs = compile_together([*jobs, *references], bar.update)
        for (_, arguments), program, (_, reference_arguments), reference, tolerance in zip(
            jobs, programs[: len(jobs)], references, programs[len(jobs) :], tolerances, strict=True
        ):
            bar.update()
            if isinstance(reference, Exception):
                raise reference
            try:
                if isinstance(program, Exception):
                    raise program
                out, again = (np.asarray(program(*arguments)) for _ in range(2))
            except UNCOMPILABLE as error:
                verdicts.append((float("inf"), f"does not run: {error}"))
                continue
            expected = np.asarray(reference(*reference_arguments))
            verdicts.append(compare_rows(out, again, expected, tolerance))
    return verdicts


def compare_rows(out: np.ndarray, again: np.ndarray, expected: np.ndarray, tolerance: float) -> Verdict:
    """Compares an output with its reference, row by row.

    Errors are relative to each row: a fault in a row of small values would vanish beside rows of large ones.

    Args:
        out: [B, N, ...], or [N, M] for one sequence.
        again: The output of a second call, which must have the same bits.
        expected: The float32 reference; where its row is zero, the row of `out` must be zero.
        tolerance: The largest relative error allowed.
    """
    if out.ndim == 2:
        return compare_rows(out[None], again[None], expected[None], tolerance)
    values = out.astype(np.float32)
    finite = np.isfinite(values.reshape(*out.shape[:2], -1)).min(axis=-1)
    if not finite.all():
        return float("inf"), f"NaN or infinity at {_first(~finite)}"
    difference = np.linalg.norm((values - expected).reshape(*out.shape[:2], -1), axis=-1)
    size = np.linalg.norm(expected.reshape(*out.shape[:2], -1), axis=-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.where(difference == 0, 0.0, difference / size)
    error = float(errors.max())
    if error > tolerance:
        return error, f"relative error of {error:.1e}, above {tolerance:.0e}, at {_first(errors > tolerance)}"
    if out.tobytes() != again.tobytes():
        return error, "a second call gives other bits"
    return error, None


def all_right(
    arguments: argparse.Namespace, checks: Sequence[Any], consequence: str = "nothing was timed"
) -> bool:
    """Whether no check has a ``problem``; prints the failed checks to stderr."""
    wrong = [check for check in checks if check.problem is not None]
    for check in wrong:
        print(f"bench: {arguments.implementation} is wrong: {check}: {check.problem}", file=sys.stderr)
    if wrong:
        failed = f"{len(wrong)} of {len(checks)} comparisons failed, with --seed {arguments.seed}"
        print(f"bench: {failed}; {consequence}", file=sys.stderr)
    return not wrong


def find_shapes(
    arguments: argparse.Namespace, known: Sequence[Any], usual: Iterable[str], implementations: Sequence[str]
) -> list[Any]:
    """Checks the arguments that all operations of ``kernel`` have; returns the shapes.

    Raises:
        ValueError: A name is unknown, or a number is too small.
    """
    by_name = {shape.name: shape for shape in known}
    arguments.shapes = list(dict.fromkeys(arguments.shapes or usual))
    check_known("shapes", arguments.shapes, by_name)
    check_known("dtypes", arguments.dtypes, TOLERANCES)
    check_known("implementation", [arguments.implementation], implementations)
    check_least(arguments, 1, "rows", "prefixes", "batch", "repeats")
    return [by_name[name] for name in arguments.shapes]


def report_of(
    arguments: argparse.Namespace,
    benchmark: str,
    ceilings: Ceilings,
    checks: Sequence[dict[str, Any]],
    rows: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The report of a kernel that was compared and then timed; ``benchmark`` is its kind."""
    return {
        **opening_of("kernel", arguments),
        "benchmark": benchmark,
        "dtype": arguments.dtypes[0],
        "implementation": arguments.implementation,
        "clock": "GPU" if on_gpu() else "host",
        "seed": arguments.seed,
        "ceilings": ceilings.entry(),
        "checks": checks,
        "rows": rows,
    }


def tables_of(
    rows: Sequence[Mapping[str, Any]], shown: Sequence[str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A titled table per shape, with the keys of the rows that are shown."""
    for name in dict.fromkeys(row["shape"] for row in rows):
        of_shape = [row for row in rows if row["shape"] == name]
        yield name, [{_heading(key): row[key] for key in shown} for row in of_shape]


def _heading(key: str) -> str:
    return key.replace("times_", "x ").replace("xla", "XLA").replace("_", " ")


def notes_of(report: Mapping[str, Any], reference: str, errors: str, call: str, read: str) -> list[str]:
    """The comparisons, and the meaning of the figures.

    Args:
        reference: What the kernel was compared with.
        errors: The largest errors.
        call: What was timed.
        read: What a call must move.
    """
    ceilings = report["ceilings"]
    clock = (
        "by the GPU's clock, its kernels (XLA's: all); wall: by the host's clock, with launches and gaps"
        if report["clock"] == "GPU"
        else "by the host's clock: there is no GPU"
    )
    return [
        f"{len(report['checks'])} comparisons with {reference}, all passed (seed {report['seed']}). "
        f"Largest {errors}.",
        f"us: one {call}, {clock}.",
        f"Floor: {read} at {ceilings['bandwidth'] / 1e9:,.0f} GB/s, or computing at "
        f"{ceilings['matmul'] / 1e12:,.2f} TFLOP/s, whichever takes longer; both measured here.",
    ]


def _first(where: np.ndarray) -> str:
    b, i = np.argwhere(where)[0]
    return f"sequence {b}, row {i} ({where.mean():.0%} of all rows)"
