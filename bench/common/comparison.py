"""Whether kernels compute what their references compute: nothing is timed before that is certain."""

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

# Of a row, relative to the reference in float32. In bfloat16 the weights and the output are rounded to
# 8 bits, which is about 3e-3.
TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-5}

#: The largest relative error of a row, and what is wrong; None if nothing is.
Verdict = tuple[float, str | None]


def compare_jobs(
    jobs: Sequence[Job], references: Sequence[Job], tolerances: Sequence[float], title: str
) -> list[Verdict]:
    """Runs each job twice and its reference once, and compares their results.

    Args:
        jobs: What is compared: [B, N, ...], or a matrix of rows.
        references: What each result should be, in float32.
        tolerances: Of each.
        title: Of the progress bar.
    """
    verdicts = []
    with Progress(total=3 * len(jobs), desc=title, unit="step") as bar:
        programs = compile_together([*jobs, *references], bar.update)
        for (_, arguments), own, (_, given), right, tolerance in zip(
            jobs, programs[: len(jobs)], references, programs[len(jobs) :], tolerances, strict=True
        ):
            bar.update()
            if isinstance(right, Exception):
                raise right
            try:
                if isinstance(own, Exception):
                    raise own
                out, again = (np.asarray(own(*arguments)) for _ in range(2))
            except UNCOMPILABLE as error:
                verdicts.append((float("inf"), f"does not run: {error}"))
                continue
            verdicts.append(compare_rows(out, again, np.asarray(right(*given)), tolerance))
    return verdicts


def compare_rows(out: np.ndarray, again: np.ndarray, expected: np.ndarray, tolerance: float) -> Verdict:
    """The largest relative error of a row, and what is wrong with the output.

    Row by row, because some rows may be large, and a mistake in small ones would vanish beside them.

    Args:
        out: [B, N, ...], or [N, M] of one sequence.
        again: What a second call gave.
        expected: What it should be, in float32; a row of zeros must be zero in `out`.
        tolerance: The largest error that is none.
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
    """Whether nothing is wrong; says on stderr what is.

    Args:
        verdicts: What was compared, in words, and what is wrong with it; None if nothing is.
        name: Of the implementation.
        seed: Of the inputs.
        consequence: What does not happen then.
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
    """The report of a kernel that was compared and then timed.

    Args:
        arguments: The command line of ``python -m bench kernel``, with its seed.
        benchmark: The report's kind.
        ceilings: Of the device.
        checks: The comparisons.
        rows: The timed cases.
    """
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
