"""Compares a kernel of tree attention with its reference."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.common.comparison import TOLERANCES, compare_jobs
from bench.kernel.cases import Attend, AttentionCall, attend_by, ragged_call
from pallas_kernels.tree_attention.shapes import AttentionShape

# Plain decoding, buckets, one row more than a mask's word, and a prompt chunk.
ROWS = (1, 16, 33, 64, 128, 256, 512)
# The most rows that are compared at long prefixes, where the reference's scores need much memory.
LONG_ROWS = 16


class AttentionCheck(NamedTuple):
    """A comparison with the reference, the largest relative error of a row, and the fault or None."""

    shape: AttentionShape
    dtype: str
    rows: int
    lengths: tuple[int, ...]
    relative_error: float = 0.0
    problem: str | None = None

    def __str__(self) -> str:
        lengths = " ".join(map(str, self.lengths))
        return f"{self.shape.name}, {self.dtype}, {self.rows} rows, prefixes of {lengths}"


def checks_of(
    shape: AttentionShape, dtypes: Sequence[str], rows: Sequence[int], prefixes: Sequence[int]
) -> Iterator[AttentionCheck]:
    """The calls of a shape: all numbers of rows on many short prefixes, and a few on the long prefixes."""
    first, *long = sorted(prefixes)
    lengths = {0, 1, 7, shape.page - 1, shape.page, 1000, first}
    lengths = {length for length in lengths if length <= first}
    if shape.window is not None:
        lengths.add(shape.window + 2 * shape.page + 3)
    few = [count for count in rows if count <= LONG_ROWS]
    for dtype in dtypes:
        # float32 differs in products and tiles, not in logic, so a few numbers of rows are enough.
        compared = rows if dtype == "bfloat16" or len(rows) <= 3 else rows[::2][:3]
        for count in compared:
            yield AttentionCheck(shape, dtype, count, tuple(sorted(lengths)))
        for i, length in enumerate(long):
            if few:
                yield AttentionCheck(shape, dtype, few[-1 - i % len(few)], (length,))


def run_checks(
    checks: Sequence[AttentionCheck], implementation: str, seed: int, title: str
) -> list[AttentionCheck]:
    """Compares an implementation with the XLA reference in float32, on inputs drawn for each check."""
    seeds = np.random.SeedSequence(seed).spawn(len(checks))
    jobs, references = [], []
    for check_seed, check in zip(seeds, checks, strict=True):
        rng, dtype = np.random.default_rng(check_seed), jnp.dtype(check.dtype)
        call = ragged_call(rng, check.shape, check.rows, check.lengths, dtype)
        jobs.append((attend_by(check.shape, implementation), (call,)))
        references.append((_reference_of(check.shape), (call,)))
    tolerances = [TOLERANCES[check.dtype] for check in checks]
    verdicts = compare_jobs(jobs, references, tolerances, title)
    return [
        check._replace(relative_error=error, problem=problem)
        for check, (error, problem) in zip(checks, verdicts, strict=True)
    ]


def _reference_of(shape: AttentionShape) -> Attend:
    def reference(call: AttentionCall) -> Array:
        exact = (
            leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
            for leaf in jax.tree.leaves(call)
        )
        return attend_by(shape, "xla")(jax.tree.unflatten(jax.tree.structure(call), exact))

    return reference
