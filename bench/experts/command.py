"""``python -m bench kernel --operation experts``: the experts of a layer, and the router's choice of them.

Both kernels are compared with their XLA references, with ids that name nobody, and an expert of NaN that
nobody names; only then are they timed. A call's floor is the weights of its tokens' experts, moved once.
"""

import argparse
import secrets
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from bench.common.floors import Ceilings, measure_ceilings
from bench.common.report import check_report, opening_of, show, write_report
from bench.experts.cases import GROUPED, Layer, experts_by, random_layer
from bench.experts.check import check_choices, check_experts
from bench.experts.report import notes_of, plot_experts, tables_of, title_of
from bench.experts.speed import time_shape
from bench.experts.tune import tune_experts
from bench.kernel.check import TOLERANCES
from bench.kernel.speed import on_gpu
from pallas_kernels.expert_choice import Choice, Routing
from pallas_kernels.expert_mlp import implementations
from pallas_kernels.expert_mlp.shapes import SHAPES, Shape

# Besides the XLA references: what is timed beside the kernels, not compared, for NaN leaks there.
BASELINES = ("xla", *GROUPED)
# The shapes that are measured unless others are named: the layers fit on one device with room for references.
DEFAULT_SHAPES = ("qwen3-30b-a3b", "gpt-oss-20b", "gemma4-26b-a4b")


def run(arguments: argparse.Namespace) -> int:
    """Compares, measures, prints the tables, and writes the JSON and the plot; or tunes."""
    shapes = _shapes(arguments)
    arguments.json = arguments.json or Path(f"results/experts{'-tuning' if arguments.tune else ''}.json")
    check_report(arguments)
    if arguments.tune:
        return tune_experts(
            shapes, arguments.rows, arguments.dtypes[0], arguments.json, opening_of("kernel", arguments)
        )
    seed = arguments.seed = secrets.randbits(32) if arguments.seed is None else arguments.seed
    dtype, names = arguments.dtypes[0], list(dict.fromkeys([arguments.implementation, *arguments.baselines]))
    ceilings: Ceilings | None = None
    checks, rows = [], []
    for shape in shapes:
        counts = arguments.rows or shape.tokens
        found = check_choices(shape, counts, arguments.implementation, seed)
        for own in arguments.dtypes:
            layer = random_layer(shape, jnp.dtype(own))
            found += check_experts(shape, layer, counts, arguments.implementation, seed)
            del layer  # gigabytes, and the next one is made before the name is free
        wrong = [check for check in found if check.problem is not None]
        if wrong:
            for check in wrong:
                message = f"{check.operation} of {check.shape}, {check.dtype}, {check.tokens} tokens"
                print(
                    f"bench: {arguments.implementation} is wrong: {message}: {check.problem}", file=sys.stderr
                )
            failed = f"{len(wrong)} of {len(found)} comparisons failed, with --seed {seed}"
            print(f"bench: {failed}; {shape.name} was not timed", file=sys.stderr)
            return 1
        checks += found
        ceilings = ceilings or measure_ceilings(jnp.dtype(dtype), arguments.repeats)
        layer = random_layer(shape, jnp.dtype(dtype))
        rows += time_shape(shape, layer, counts, names, arguments.repeats, ceilings)
        del layer
    assert ceilings is not None
    report = {
        **opening_of("kernel", arguments),
        "benchmark": "experts",
        "dtype": dtype,
        "implementation": arguments.implementation,
        "clock": "GPU" if on_gpu() else "host",
        "seed": seed,
        "ceilings": {**ceilings._asdict(), "bandwidth": ceilings.bandwidth},
        "checks": [check._asdict() for check in checks],
        "rows": rows,
    }
    notes, title = notes_of(report), title_of(report)
    print(f"\n{title}")
    *tables, (heading, table) = tables_of(rows)
    for others in tables:
        show(*others)
    show(heading, table, notes)
    write_report(arguments.json, {**report, "notes": notes})
    plot_experts([row for row in rows if row["operation"] == "expert_mlp"], title, arguments.plot)
    return 0


def _shapes(arguments: argparse.Namespace) -> list[Shape]:
    """The shapes that are asked for, once the arguments are checked.

    Raises:
        ValueError: An argument is out of its range or tree attention's, or an implementation does not run.
    """
    known = {shape.name: shape for shape in SHAPES}
    arguments.shapes = arguments.shapes or list(DEFAULT_SHAPES)
    if arguments.baselines is None:
        arguments.baselines = list(BASELINES[:2])
    for option, given, names in (
        ("shapes", arguments.shapes, known),
        ("dtypes", arguments.dtypes, TOLERANCES),
        ("implementation", [arguments.implementation], implementations()),
        ("baselines", arguments.baselines, BASELINES),
    ):
        for name in given:
            if name not in names:
                raise ValueError(f"--{option} must be one of {', '.join(names)}, not {name!r}")
    if arguments.prefixes or arguments.batch != 1 or arguments.again:
        raise ValueError("--operation experts has no --prefixes, --batch and --again")
    if arguments.repeats < 1 or min(arguments.rows or [1]) < 1:
        raise ValueError("--repeats and --rows must be at least 1")
    tiny = Shape("tiny", 4, 32, 16, Routing(2))
    for name in (arguments.implementation, *arguments.baselines):
        call = Layer(jnp.zeros((4, 32, 2, 16)), jnp.zeros((4, 16, 32)), None, None)
        choice = Choice(jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 2)))
        try:
            # Traced, not run: an implementation refuses what it cannot do before it computes anything.
            jax.eval_shape(experts_by(tiny, name), call, jnp.zeros((3, 32)), choice)
        except (NotImplementedError, ImportError) as error:
            raise ValueError(f"{name}: {error}") from None
    return [known[name] for name in dict.fromkeys(arguments.shapes)]
