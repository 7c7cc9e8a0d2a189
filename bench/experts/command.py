"""``python -m bench kernel --operation experts``: the experts of a layer, and the router's choice of them.

Both kernels are first compared with their XLA references. Some ids name no expert, and no token chooses an
expert whose weights are NaN. Then the kernels are timed. A call's floor is reading the weights of its tokens'
experts once.
"""

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.common.comparison import all_right, find_shapes, notes_of, report_of
from bench.common.floors import Ceilings, measure_ceilings
from bench.common.options import check_known
from bench.common.report import check_report, measured_on, publish
from bench.experts.cases import GROUPED, STORED, ExpertWeights, experts_by, random_layer
from bench.experts.check import check_choices, check_experts
from bench.experts.report import tables_of
from bench.experts.speed import time_shape
from pallas_kernels.expert_choice import ExpertChoice, RouterRule
from pallas_kernels.expert_mlp import implementations
from pallas_kernels.expert_mlp.shapes import SHAPES, ExpertShape

# Timed beside the kernels, and not compared: in these, NaN leaks from experts that no token chooses.
BASELINES = ("xla", *GROUPED)
# The default shapes: their layers fit into one device together with the references.
DEFAULT_SHAPES = ("qwen3-30b-a3b", "gpt-oss-20b", "gemma4-26b-a4b")


def run(arguments: argparse.Namespace) -> int:
    """Compares, measures, prints the tables, and writes the JSON and the plot."""
    shapes = _shapes(arguments)
    arguments.json = arguments.json or Path("results/experts.json")
    check_report(arguments)
    seed, dtype = arguments.seed, arguments.dtypes[0]
    names = list(dict.fromkeys([arguments.implementation, *arguments.baselines]))
    ceilings: Ceilings | None = None
    checks, rows = [], []
    for shape in shapes:
        counts = arguments.rows or shape.tokens
        found = check_choices(shape, counts, arguments.implementation, seed)
        for compared in map(jnp.dtype, arguments.dtypes):
            layer = random_layer(shape, compared, arguments.weights)
            found += check_experts(shape, layer, compared, counts, arguments.implementation, seed)
            del layer  # frees gigabytes before the next layer is made
        if not all_right(arguments, found, f"{shape.name} was not timed"):
            return 1
        checks += found
        ceilings = ceilings or measure_ceilings(jnp.dtype(dtype), arguments.repeats)
        layer = random_layer(shape, jnp.dtype(dtype), arguments.weights)
        stored, repeats = arguments.weights, arguments.repeats
        rows += time_shape(shape, layer, jnp.dtype(dtype), stored, counts, names, repeats, ceilings)
        del layer
    assert ceilings is not None
    entries = [check._asdict() for check in checks]
    report = report_of(arguments, "experts", ceilings, entries, rows) | {"weights": arguments.weights}
    worst: dict[tuple[str, str], float] = {}
    for check in checks:
        key = check.operation, check.dtype
        worst[key] = max(worst.get(key, 0.0), check.relative_error)
    largest = ", ".join(f"{error:.1e} of {name} in {dtype}" for (name, dtype), error in worst.items())
    errors = f"relative error of a row: {largest}"
    read = "the tokens' experts (their mean number is the column experts) read once"
    notes = notes_of(report, "the references in float32", errors, "call", read)
    weights = "" if arguments.weights == "plain" else f" in {arguments.weights}"
    title = f"experts of a layer{weights} by {arguments.implementation}, {measured_on(report)}"
    publish(arguments, report, tables_of(rows), notes, title=title)
    return 0


def _shapes(arguments: argparse.Namespace) -> list[ExpertShape]:
    """Checks the arguments; returns the shapes.

    Raises:
        ValueError: An argument is out of range or belongs to tree attention, or an implementation cannot run.
    """
    shapes = find_shapes(arguments, SHAPES, DEFAULT_SHAPES, implementations())
    if arguments.baselines is None:
        arguments.baselines = list(BASELINES[: 2 if arguments.weights == "plain" else 1])
    check_known("baselines", arguments.baselines, BASELINES)
    check_known("weights", [arguments.weights], STORED)
    if arguments.weights != "plain" and not GROUPED.keys().isdisjoint(arguments.baselines):
        raise ValueError(f"--weights {arguments.weights} does not go with {', '.join(GROUPED)}")
    if arguments.prefixes or arguments.batch != 1 or arguments.tune or arguments.again:
        raise ValueError("--operation experts has no --prefixes, --batch, --tune and --again")
    tiny = ExpertShape("tiny", 4, 32, 16, RouterRule(2))
    for name in (arguments.implementation, *arguments.baselines):
        call = ExpertWeights(jnp.zeros((4, 32, 2, 16)), jnp.zeros((4, 16, 32)), None, None)
        choice = ExpertChoice(jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 2)))
        try:
            # Tracing is enough: an implementation raises for unsupported cases before it computes anything.
            jax.eval_shape(experts_by(tiny, name), call, jnp.zeros((3, 32)), choice)
        except (NotImplementedError, ImportError) as error:
            raise ValueError(f"{name}: {error}") from None
    return shapes
