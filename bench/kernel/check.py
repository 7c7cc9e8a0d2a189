"""Whether a kernel computes what the reference computes: nothing is timed before that is certain."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from bench.common.programs import UNCOMPILABLE, compile_together
from bench.kernel.cases import Call, attend_by, ragged_call
from pallas_kernels.tree_attention.shapes import Shape

# Of a row of the output over all heads, relative to the reference in float32. In bfloat16 the weights and
# the output are rounded to 8 bits, which is about 3e-3.
TOLERANCES = {"bfloat16": 2e-2, "float32": 1e-5}
# Plain decoding, buckets, one beyond a mask's word, and a prompt's chunk.
ROWS = (1, 16, 33, 64, 128, 256, 512)
# Rows that are also tried at long prefixes, where the reference's scores are large.
LONG_ROWS = 16


class Check(NamedTuple):
    """A call to be compared."""

    shape: Shape
    dtype: str
    rows: int
    lengths: tuple[int, ...]

    def __str__(self) -> str:
        """For messages."""
        lengths = " ".join(map(str, self.lengths))
        return f"{self.shape.name}, {self.dtype}, {self.rows} rows, prefixes of {lengths}"


class Outcome(NamedTuple):
    """What a comparison found.

    Attributes:
        check: What was compared.
        error: The largest relative error of a row of a sequence.
        problem: What is wrong; None if nothing is.
    """

    check: Check
    error: float
    problem: str | None


def checks_of(
    shape: Shape, dtypes: Sequence[str], rows: Sequence[int], prefixes: Sequence[int]
) -> Iterator[Check]:
    """The calls of a shape: all rows on prefixes of many lengths, and a few on the long prefixes."""
    first, *long = sorted(prefixes)
    lengths = {0, 1, 7, shape.page - 1, shape.page, 1000, first}
    lengths = {length for length in lengths if length <= first}
    if shape.window is not None:
        lengths.add(shape.window + 2 * shape.page + 3)
    few = [count for count in rows if count <= LONG_ROWS]
    for dtype in dtypes:
        # Float32 differs in products and tiles, not in logic: some rows will do.
        own = rows if dtype == "bfloat16" or len(rows) <= 3 else rows[::2][:3]
        for count in own:
            yield Check(shape, dtype, count, tuple(sorted(lengths)))
        for i, length in enumerate(long):
            if few:
                yield Check(shape, dtype, few[-1 - i % len(few)], (length,))


def run_checks(checks: Sequence[Check], implementation: str, seed: int, title: str) -> list[Outcome]:
    """Compares an implementation with the XLA reference in float32, on inputs drawn for each check.

    Args:
        checks: What to compare.
        implementation: One of `implementations()`.
        seed: Of the inputs.
        title: Of the progress bar.
    """
    seeds = np.random.SeedSequence(seed).spawn(len(checks))
    calls = [
        ragged_call(
            np.random.default_rng(own), check.shape, check.rows, check.lengths, jnp.dtype(check.dtype)
        )
        for own, check in zip(seeds, checks, strict=True)
    ]
    jobs: dict[Check, tuple[Any, tuple[Any, ...]]] = {}
    for check, call in zip(checks, calls, strict=True):
        jobs[check] = attend_by(check.shape, implementation), (call,)
        # The dtypes share their references, which are in float32.
        reference = attend_by(check.shape, "xla"), (jax.eval_shape(_in_float32, call),)
        jobs[check._replace(dtype="")] = reference
    outcomes = []
    with tqdm(total=len(jobs) + len(checks), desc=title, unit="step") as bar:
        programs = dict(zip(jobs, compile_together(list(jobs.values()), bar.update), strict=True))
        for check, call in zip(checks, calls, strict=True):
            attend, reference = programs[check], programs[check._replace(dtype="")]
            if isinstance(reference, Exception):
                raise reference
            bar.update()
            try:
                if isinstance(attend, Exception):
                    raise attend
                out, again = np.asarray(attend(call)), np.asarray(attend(call))
            except UNCOMPILABLE as error:
                outcomes.append(Outcome(check, float("inf"), f"does not run: {error}"))
                continue
            expected = np.asarray(reference(_in_float32(call)))
            outcomes.append(Outcome(check, *compare(out, again, expected, TOLERANCES[check.dtype])))
    return outcomes


def compare(
    out: np.ndarray, again: np.ndarray, expected: np.ndarray, tolerance: float
) -> tuple[float, str | None]:
    """The largest relative error of a row, and what is wrong with the output.

    Row by row, because the outputs over short prefixes are large, and a mistake in those over long ones would
    vanish beside them.

    Args:
        out: [B, N, H, E].
        again: What a second call gave.
        expected: What it should be, in float32; a row that sees nothing is zero, and must be zero in `out`.
        tolerance: The largest error that is none.
    """
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


def _first(where: np.ndarray) -> str:
    b, i = np.argwhere(where)[0]
    return f"sequence {b}, row {i} ({where.mean():.0%} of all rows)"


def _in_float32(call: Call) -> Call:
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, call
    )
