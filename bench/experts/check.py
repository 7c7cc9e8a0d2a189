"""Whether the kernels of a mixture of experts compute what their references compute."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from tqdm import tqdm

from bench.common.programs import UNCOMPILABLE, compile_together
from bench.experts.cases import Layer, choice_by, experts_by, random_choices
from bench.kernel.check import TOLERANCES, compare
from pallas_kernels.expert_choice import Choice
from pallas_kernels.expert_mlp.shapes import Shape

# Of the ids, where there are several tokens: those that name nobody.
NOBODY = 0.1


class Check(NamedTuple):
    """A comparison: of what, the largest relative error of a row, and what is wrong; None if nothing is."""

    operation: str
    shape: str
    dtype: str
    tokens: int
    relative_error: float
    problem: str | None
    tolerance: float


#: A function and its arguments.
Job = tuple[Callable[..., Any], tuple[Any, ...]]


def check_experts(shape: Shape, layer: Layer, counts: Sequence[int], name: str, seed: int) -> list[Check]:
    """`expert_mlp` beside its reference in float32, for each number of tokens."""
    dtype = layer.down.dtype
    tolerance = TOLERANCES[dtype.name]

    def in_float32(layer: Layer, x: Array, choice: Choice) -> Array:
        layer, x = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), (layer, x))
        return experts_by(shape, "xla")(layer, x, choice)

    jobs: list[Job] = []
    for count in counts:
        rng = np.random.default_rng([seed, count])
        x = jnp.asarray(rng.standard_normal((count, shape.size), np.float32).astype(dtype))
        choice = jax.tree.map(lambda leaf: leaf[0], random_choices(rng, shape, 1, count))
        named = jnp.asarray((rng.random(choice.experts.shape) >= NOBODY) | (count == 1))
        nobody = rng.choice(np.asarray([-1, shape.experts], np.int32))
        call = layer, x, choice._replace(experts=jnp.where(named, choice.experts, nobody))
        jobs += [(experts_by(shape, name), call), (in_float32, call)]
    found = _twice(jobs, f"check {shape.name}, {dtype}")
    return [
        Check("expert_mlp", shape.name, dtype.name, count, *_judge(own, right, tolerance), tolerance)
        for count, own, right in zip(counts, found[::2], found[1::2], strict=True)
    ]


def check_choices(shape: Shape, counts: Sequence[int], name: str, seed: int) -> list[Check]:
    """`expert_choice` beside its reference, for each number of tokens."""
    tolerance = TOLERANCES["float32"]

    def as_matrix(run: Callable[[Array], Choice]) -> Callable[[Array], Array]:
        """Of every token a row, its experts before their weights: another expert is a large error."""
        return lambda logits: jnp.concatenate([own.astype(jnp.float32) for own in run(logits)], axis=1)

    jobs: list[Job] = []
    for count in counts:
        size = count, shape.experts
        logits = jnp.asarray(np.random.default_rng([seed, *size]).standard_normal(size, np.float32))
        jobs += [(as_matrix(choice_by(shape, own)), (logits,)) for own in (name, "xla")]
    found = _twice(jobs, f"check the choice of {shape.name}")
    return [
        Check("expert_choice", shape.name, "float32", count, *_judge(own, right, tolerance), tolerance)
        for count, own, right in zip(counts, found[::2], found[1::2], strict=True)
    ]


def _twice(jobs: Sequence[Job], title: str) -> list[Any]:
    """What two calls of each job give, or the error of what does not run."""
    results = []
    with tqdm(total=2 * len(jobs), desc=title, unit="step") as bar:
        for program, (_, arguments) in zip(compile_together(jobs, bar.update), jobs, strict=True):
            try:
                if isinstance(program, Exception):
                    raise program
                results.append([np.asarray(program(*arguments)) for _ in range(2)])
            except UNCOMPILABLE as error:
                results.append(error)
            bar.update()
    return results


def _judge(own: Any, right: Any, tolerance: float) -> tuple[float, str | None]:
    """The largest relative error of a row, and what is wrong."""
    if isinstance(right, Exception):
        raise right
    if isinstance(own, Exception):
        return float("inf"), f"does not run: {own}"
    return compare(own[0][None], own[1][None], right[0][None], tolerance)
