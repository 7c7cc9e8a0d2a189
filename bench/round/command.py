"""``python -m bench round``: times one round of speculation and its phases, and compares them with a floor.

Every slot starts after a context of random pages, without a prefill, and rounds run from there. The floor of
a round is the bytes that it must read at the device's measured bandwidth, or the operations that it must
compute at the measured matmul rate, whichever takes longer. With random weights nearly all drafts are
rejected, so a round commits about one token, and the context hardly grows.
"""

import argparse
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from bench.common.floors import measure_ceilings
from bench.common.methods import CHAIN, check_fixed_budgets, fixed_budget_names
from bench.common.options import add_program_arguments, add_switch, best_attention, check_least
from bench.common.pair import load_pair, shapes_of
from bench.common.report import add_report_arguments, check_report, opening_of, publish, settings_of
from bench.common.scene import Scene, random_weights
from bench.common.shapes import SHAPES, STORED, PairShape, find_pair_shape, stored_as, with_selector
from bench.common.timing import peak_bytes
from bench.round.measure import ROUNDS, CaseRuns, RoundCase, Setup, measure
from bench.round.report import notes_of, row_of, tables_of
from jetspec_jax import DecodeWeights, SamplingParams, enable_compilation_cache
from jetspec_jax.checkpoint.source import resolve_dtype
from jetspec_jax.cli.options import MODELS, PARALLEL, add_ignore_option, add_target_option, parallel_mesh
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.device.memory import free_bytes
from jetspec_jax.device.mesh import describe_mesh, size_of
from jetspec_jax.device.partition import check_partition
from jetspec_jax.device.peers import make_exchange
from jetspec_jax.progress import Progress
from jetspec_jax.tree import DEFAULT_ALGORITHM
from pallas_kernels.tree_attention import check_implementation

# The share of free memory for the stores of all cases; programs need the rest.
STORES_SHARE = 0.6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add = parser.add_argument
    add(
        "--shape",
        help=f"shape of the random weights: {', '.join(SHAPES)} (default: qwen3-8b on a GPU, else tiny)",
    )
    formats = ", ".join(STORED)
    add("--weights", default="plain", help=f"format of the random target: {formats} (default: plain)")
    add("--selector-rank", type=int, help="a selector of this rank in the random head")
    add_target_option(parser, "folder or hub id, or a pair's name, instead of --shape")
    add("--draft-head", help="folder or hub id, with --model (default: the demo's)")
    add_ignore_option(parser)
    add(
        "--budgets",
        type=int,
        nargs="+",
        default=[64, 128, 256],
        help="nodes of the trees; 1 is always measured",
    )
    add(
        "--algorithms",
        nargs="+",
        default=[DEFAULT_ALGORITHM],
        metavar="NAME",
        help=f"algorithms with their default options: all, or some of {', '.join(fixed_budget_names())} "
        f"(default: {DEFAULT_ALGORITHM})",
    )
    add("--contexts", type=int, nargs="+", default=[1024], help="committed tokens per slot (default: 1024)")
    add("--batches", type=int, nargs="+", default=[1], help="numbers of slots (default: 1)")
    MODELS.add(parser, ["width", "candidates"])
    add("--temperature", type=float, default=0.0, help="slot i has seed i (default: 0)")
    add("--top-p", type=float, help="with a temperature (default: all tokens)")
    add("--rounds", type=int, default=ROUNDS, help="rounds per dispatch (default: %(default)s)")
    add("--repeats", type=int, default=7, help="timed dispatches, interleaved (default: 7)")
    fields = ["implementation", "fp8_activations", *PARALLEL[:-1]]
    MODELS.add(parser, fields, implementation=best_attention())
    add_switch(
        parser,
        "--phases",
        "also time each phase alone (default: yes on one device, no on several)",
        default=None,
    )
    add_program_arguments(parser)
    add_report_arguments(parser, "round")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables, and writes the JSON and the plot."""
    setup, dtype = _setup(arguments), resolve_dtype(arguments.dtype)
    check_report(arguments)
    enable_compilation_cache(arguments.compilation_cache)
    names, shape, make_weights = _models(arguments, dtype, setup.mesh)
    check_partition(shape.target, setup.mesh)
    cases = cases_of(arguments, shape, setup)
    weights = make_weights()

    measured: dict[RoundCase, CaseRuns] = {}
    with Progress(total=setup.steps(len(cases)) + 1, unit="step") as bar:

        def step(name: str) -> None:
            bar.set_description(name)
            bar.update()

        for group in groups(cases, shape, dtype, setup, free_bytes()):
            measured |= measure(group, shape, weights, setup, step)
        # Read before the ceilings are measured, because that needs large arrays.
        peak = peak_bytes()
        step("ceilings")
        ceilings = measure_ceilings(dtype, setup.repeats)

    rows = [
        row_of(case, found, measured, shape, dtype.itemsize, setup, ceilings)
        for case, found in measured.items()
    ]
    report = {
        **opening_of("round", arguments),
        "devices": size_of(setup.mesh),
        **names,
        "shapes": shapes_of(shape.target, shape.head),
        "dtype": str(dtype),
        "implementation": setup.implementation,
        "rounds_per_dispatch": setup.rounds,
        "compilation_cache": bool(getattr(jax.config, "jax_compilation_cache_dir", None)),
        "peak_memory_bytes": peak,
        "ceilings": ceilings.entry(),
        "rows": rows,
    }
    title = (
        f"{' + '.join(names.values())}, {report['dtype']}, T = {arguments.temperature:g}, attention "
        f"{report['implementation']}, {report['device']}, {describe_mesh(setup.mesh)}, JAX {report['jax']}"
    )
    publish(arguments, report, tables_of(rows), notes_of(report), title=title)
    return 0


def _setup(arguments: argparse.Namespace) -> Setup:
    """Checks the settings that all cases share; a default ``phases`` is filled in.

    Raises:
        ValueError: A setting is out of range, or phases are to be timed on several devices.
        NotImplementedError: The implementation of tree attention cannot run on this device.
    """
    check_least(arguments, 1, "rounds", "repeats")
    check_implementation(arguments.implementation)
    shared = any(
        size is not None for size in (arguments.tensor_parallel_size, arguments.expert_parallel_size)
    )
    if arguments.phases is None:
        arguments.phases = not shared
    elif arguments.phases and shared:
        # Phases exchange logits, which are sharded over devices.
        raise ValueError(
            "--phases goes with neither --tensor-parallel-size nor --expert-parallel-size: "
            "on several devices only whole rounds can be timed"
        )
    mesh = parallel_mesh(arguments)
    return Setup(
        params=SamplingParams(temperature=arguments.temperature, top_p=arguments.top_p),
        width=arguments.width,
        candidates=arguments.candidates,
        rounds=arguments.rounds,
        repeats=arguments.repeats,
        implementation=arguments.implementation,
        phases=arguments.phases,
        profile=arguments.profile,
        mesh=mesh,
    )


def _models(
    arguments: argparse.Namespace, dtype: jnp.dtype, mesh: Mesh | None
) -> tuple[dict[str, str], PairShape, Callable[[], DecodeWeights]]:
    """The models' names for the report, their configs, and a function that makes their parameters.

    Without ``shape`` and ``target`` a default ``shape`` is filled in.

    Raises:
        ValueError: Both random weights and a checkpoint are named, or a head without a target.
        FileNotFoundError: A checkpoint is missing.
    """
    if arguments.target is None and arguments.draft_head is None:
        name = arguments.shape or ("qwen3-8b" if jax.default_backend() == "gpu" else "tiny")
        arguments.shape = name
        shape = stored_as(find_pair_shape(name), arguments.weights)
        names = {"shape": name}
        if arguments.weights != "plain":
            names["weights"] = arguments.weights
        if arguments.selector_rank is not None:
            check_least(arguments, 1, "selector_rank")
            shape = with_selector(shape, arguments.selector_rank)
            names["selector"] = f"selector of rank {arguments.selector_rank}"
        return (
            names,
            shape,
            lambda: DecodeWeights(
                random_weights(shape.target, dtype, 0, mesh),
                random_weights(shape.head, dtype, 1, mesh),
                make_exchange(mesh, shape.target.hidden_size, dtype),
            ),
        )
    if arguments.weights != "plain":
        raise ValueError("--weights is for random weights: a checkpoint names the format of its weights")
    if arguments.selector_rank is not None:
        raise ValueError("--selector-rank is for random weights: a checkpoint says whether it has a selector")
    if arguments.shape is not None:
        raise ValueError("--shape means random weights: it goes with neither --model nor --draft-head")
    if arguments.target is None:
        raise ValueError("--draft-head goes with --model")
    if mesh is not None:
        raise ValueError(
            "--tensor-parallel-size and --expert-parallel-size need random weights: name a --shape"
        )
    target, head = load_pair(arguments, arguments.dtype)
    weights, given = DecodeWeights(target.weights, head.weights), settings_of(arguments)
    names = {name: given[name] for name in ("target", "draft_head") if given[name] is not None}
    return names, PairShape(target.config, head.config), lambda: weights


def cases_of(arguments: argparse.Namespace, shape: PairShape, setup: Setup) -> list[RoundCase]:
    """All cases, with the plain step first in each scene. A chain has at most the nodes that the head drafts.

    Raises:
        ValueError: A number is out of range.
    """
    check_least(arguments, 1, "batches", "contexts")
    algorithms = fixed_budget_names() if "all" in arguments.algorithms else tuple(arguments.algorithms)
    check_fixed_budgets("--algorithms", algorithms)
    for budget, algorithm in itertools.product(arguments.budgets, algorithms):
        settings = TreeSettings(budget, setup.width, None, algorithm, setup.candidates)
        settings.check(shape.target, shape.head.depth)
    scenes = itertools.product(sorted(set(arguments.batches)), sorted(set(arguments.contexts)))
    trees = dict.fromkeys(
        (min(budget, shape.head.block_size) if algorithm == CHAIN else budget, algorithm)
        for budget in sorted({*arguments.budgets} - {1})
        for algorithm in algorithms
    )
    cases = [
        case
        for batch, context in scenes
        for case in (RoundCase(batch, context, 1), *(RoundCase(batch, context, *tree) for tree in trees))
    ]
    limit = shape.target.max_position_embeddings
    for case in cases:
        scene = setup.scene(case, shape)
        if case.context + scene.room > limit:
            raise ValueError(
                f"--contexts {case.context} and room for the {scene.room} tokens that {setup.rounds} rounds "
                f"may commit go beyond the target's context limit of {limit}"
            )
    return cases


def groups(
    cases: list[RoundCase], shape: PairShape, dtype: jnp.dtype, setup: Setup, free_bytes: int | None
) -> list[list[RoundCase]]:
    """Groups of interleaved cases: all cases if their stores fit into memory, else a group per scene."""
    scenes: dict[Scene, list[RoundCase]] = {}
    for case in cases:
        scenes.setdefault(setup.scene(case, shape), []).append(case)
    with_head = setup.decoder(cases[0]._replace(budget=2), shape)
    needed = sum(scene.num_bytes(with_head, dtype) for scene in scenes)
    fits = free_bytes is None or needed <= STORES_SHARE * free_bytes
    return [cases] if fits else list(scenes.values())
