"""Compares the kernels of a mixture of experts with their references."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from bench.common.comparison import TOLERANCES, compare_jobs
from bench.experts.cases import ExpertWeights, choice_by, experts_by, random_choices
from pallas_kernels.expert_choice import ExpertChoice
from pallas_kernels.expert_mlp.shapes import ExpertShape
from pallas_kernels.weights import Narrow

# The share of ids without an expert, if there are several tokens.
NOBODY = 0.1


class ExpertCheck(NamedTuple):
    """A comparison, the largest relative error of a row, and the fault or None."""

    operation: str
    shape: str
    dtype: str
    tokens: int
    relative_error: float
    problem: str | None
    tolerance: float

    def __str__(self) -> str:
        return f"{self.operation} of {self.shape}, {self.dtype}, {self.tokens} tokens"


def check_experts(
    shape: ExpertShape, layer: ExpertWeights, dtype: jnp.dtype, counts: Sequence[int], name: str, seed: int
) -> list[ExpertCheck]:
    """Compares `expert_mlp` with its float32 reference, for each number of tokens."""
    tolerance = TOLERANCES[dtype.name]

    def in_float32(layer: ExpertWeights, x: Array, choice: ExpertChoice) -> Array:
        def wide(weights: Array | Narrow) -> Array | Narrow:
            # The reference widens quantised weights.
            return weights if isinstance(weights, Narrow) else weights.astype(jnp.float32)

        layer = jax.tree.map(wide, layer, is_leaf=lambda leaf: isinstance(leaf, Narrow))
        return experts_by(shape, "xla")(layer, x.astype(jnp.float32), choice)

    jobs, references = [], []
    for count in counts:
        rng = np.random.default_rng([seed, count])
        x = jnp.asarray(rng.standard_normal((count, shape.size), np.float32).astype(dtype))
        choice = jax.tree.map(lambda leaf: leaf[0], random_choices(rng, shape, 1, count))
        named = jnp.asarray((rng.random(choice.experts.shape) >= NOBODY) | (count == 1))
        nobody = rng.choice(np.asarray([-1, shape.experts], np.int32))
        call = layer, x, choice._replace(experts=jnp.where(named, choice.experts, nobody))
        jobs.append((experts_by(shape, name), call))
        references.append((in_float32, call))
    verdicts = compare_jobs(jobs, references, [tolerance] * len(jobs), f"check {shape.name}, {dtype}")
    return [
        ExpertCheck("expert_mlp", shape.name, dtype.name, count, *verdict, tolerance)
        for count, verdict in zip(counts, verdicts, strict=True)
    ]


def check_choices(shape: ExpertShape, counts: Sequence[int], name: str, seed: int) -> list[ExpertCheck]:
    """Compares `expert_choice` with its reference, for each number of tokens."""
    tolerance = TOLERANCES["float32"]

    def as_matrix(run: Callable[[Array], ExpertChoice]) -> Callable[[Array], Array]:
        """A row per token with its experts and their weights: a wrong expert is a large error."""
        return lambda logits: jnp.concatenate([part.astype(jnp.float32) for part in run(logits)], axis=1)

    jobs, references = [], []
    for count in counts:
        size = count, shape.experts
        logits = jnp.asarray(np.random.default_rng([seed, *size]).standard_normal(size, np.float32))
        jobs.append((as_matrix(choice_by(shape, name)), (logits,)))
        references.append((as_matrix(choice_by(shape, "xla")), (logits,)))
    title = f"check the choice of {shape.name}"
    verdicts = compare_jobs(jobs, references, [tolerance] * len(jobs), title)
    return [
        ExpertCheck("expert_choice", shape.name, "float32", count, *verdict, tolerance)
        for count, verdict in zip(counts, verdicts, strict=True)
    ]
