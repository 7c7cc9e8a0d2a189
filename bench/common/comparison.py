"""Compares kernels with their references. Commands time a kernel only after this comparison."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.common.floors import Ceilings
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
        title: The progress bar's title.
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


def all_right(verdicts: Sequence[tuple[Any, str | None]], name: str, seed: int, consequence: str) -> bool:
    """Whether all comparisons passed; prints the failures to stderr.

    Args:
        verdicts: Each case and its fault, or None.
        name: The implementation.
        seed: The seed of the inputs.
        consequence: Printed after a failure, as "nothing was timed".
    """
    wrong = [(case, problem) for case, problem in verdicts if problem is not None]
    for case, problem in wrong:
        print(f"bench: {name} is wrong: {case}: {problem}", file=sys.stderr)
    if wrong:
        failed = f"{len(wrong)} of {len(verdicts)} comparisons failed, with --seed {seed}"
        print(f"bench: {failed}; {consequence}", file=sys.stderr)
    return not wrong


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


def _first(where: np.ndarray) -> str:
    b, i = np.argwhere(where)[0]
    return f"sequence {b}, row {i} ({where.mean():.0%} of all rows)"
