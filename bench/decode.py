"""``python -m bench decode``: plain decoding, a chain, and trees of many kinds, on one set of prompts.

Methods are measured in groups, one for each budget, and plain decoding in each of them again: a speed-up is
over plain decoding of the same minutes. The report is written after every group, and ``--resume`` measures
what is missing in it. With ``--together`` all methods are one group.
"""

import argparse
import itertools
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench.decode_measure import Bench
from bench.decode_methods import PLAIN_METHOD, choose_algorithms, choose_methods
from bench.decode_plot import plot_decode
from bench.decode_record import begin_report, finish_report, shown
from bench.decode_report import Rows, tables_of
from bench.decode_work import TASK_OF_SET, make_work
from bench.prompt_sets import PROMPT_SETS
from bench.prompts import load_prompts, template_arguments
from bench.report import check_writable, show, write_json
from jetspec_jax import Head, Target, enable_compilation_cache, load_draft_head, load_target
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.tree import algorithm_names
from pallas_kernels.dispatch import gpu_problem

DEMO = "demo"


def add_command(commands: Any) -> None:
    """Adds the command line of this benchmark."""
    parser = commands.add_parser("decode", help="plain decoding, a chain, and trees", description=__doc__)
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--target", default=DEMO, help="folder or hub id (default: the demo)")
    add("--draft-head", help="folder or hub id (default: the demo's)")
    add(
        "--prompts",
        default=DEMO,
        help=f'"demo", {", ".join(PROMPT_SETS)}, or JSONL with "messages", "text" or "prompt" in each line',
    )
    add("--num-prompts", type=int, default=8, help="how many (default: 8)")
    add("--max-tokens", type=int, default=128, help="for each prompt (default: 128)")
    add(
        "--temperatures",
        "--temperature",
        type=float,
        nargs="+",
        default=[0.0],
        metavar="T",
        help="0 is greedy; prompt i has seed i (default: 0)",
    )
    add(
        "--algorithms",
        nargs="+",
        default=["accum_logp"],
        metavar="NAME",
        help=f'of {", ".join(algorithm_names())}, or "all" (default: accum_logp)',
    )
    add(
        "--algorithm-option",
        action="append",
        default=[],
        metavar="[ALGORITHM.]NAME=VALUE",
        help="option of an algorithm, its value in JSON, as top2gap_fanout.beta=2.0; may recur",
    )
    add("--profile", type=Path, help="JSON table of measured acceptance, for the algorithms that take one")
    add(
        "--task",
        help="what algorithms that route are told of the prompts: math, code, chat, ..., or "
        f'"{TASK_OF_SET}" for what the prompt set says of each (default: nothing)',
    )
    add("--budgets", type=int, nargs="+", default=[16, 32, 64, 128], metavar="N", help="of the trees")
    add("--width", type=int, default=7, help="of the trees (default: 7)")
    add("--batch", type=int, default=1, help="prompts decoded at a time (default: 1)")
    add("--repeats", type=int, default=3, help="timed runs, interleaved (default: 3)")
    add(
        "--together",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="all methods take turns, not only those of a budget; the report is written once, at the end",
    )
    add(
        "--enable-thinking",
        action=argparse.BooleanOptionalAction,
        help="for chat templates that know it (default: no, as in published evaluations)",
    )
    add("--dtype", default="auto", help="auto, float32 or bfloat16")
    # Named in every report, also where nobody chose one.
    best = "xla" if gpu_problem() else "pallas_triton"
    add("--implementation", default=best, help=f"of tree attention (default: here {best})")
    add("--compilation-cache", default="auto", help='folder, "auto" or "off" (default: auto)')
    add("--json", type=Path, default=Path("results/decode.json"), help="where to")
    add("--resume", action="store_true", help="keep what the JSON holds already, and measure what is missing")
    add("--plot", type=Path, help="where to (default: a PNG beside the JSON)")
    add("--plot-budget", type=int, help="whose acceptance by depth is shown (default: the largest)")


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables, and writes the JSON and the plot.

    Raises:
        FileNotFoundError: A checkpoint, the prompts or the profile are not to be had.
        ValueError: A setting or a prompt is not valid, or the report to go on with is another one.
    """
    plot = arguments.plot or arguments.json.with_suffix(".png")
    for path in (arguments.json, plot):
        check_writable(path)
    _check(arguments)
    algorithms = choose_algorithms(arguments.algorithms, arguments.algorithm_option, arguments.profile)
    prompts = load_prompts(arguments.prompts, arguments.num_prompts)
    enable_compilation_cache(arguments.compilation_cache)
    target, head = _models(arguments)
    groups = choose_methods(target, head, algorithms, arguments.budgets, arguments.width)
    report = begin_report(arguments, target)
    template = template_arguments(target, arguments.enable_thinking)
    works = {
        temperature: make_work(
            target,
            prompts,
            temperature,
            max_tokens=arguments.max_tokens,
            task=arguments.task,
            arguments=template,
            batch=arguments.batch,
            implementation=arguments.implementation,
        )
        for temperature in sorted(set(arguments.temperatures))
    }
    bench = Bench(target, head, works, batch=arguments.batch, implementation=arguments.implementation)
    rows = Rows(target, works, head.config.depth)

    done = {row["method"] for row in report["rows"]}
    groups = [[method for method in group if method.name not in done] for group in groups]
    if arguments.together:
        groups = [list(itertools.chain.from_iterable(groups))]
    groups = [[PLAIN_METHOD, *group] for group in groups if group]
    if groups:
        bench.check(groups[-1])
    steps = sum(map(len, groups)) * (1 + arguments.repeats * len(works))
    with tqdm(total=steps, unit="run") as bar:

        def step(name: str) -> None:
            bar.set_description(name)
            bar.update()

        for group in groups:
            found = bench.measure(group, arguments.repeats, step)
            bar.set_description("compare")
            for (method, temperature), measured in found.items():
                if method.name not in done:
                    plain = found[PLAIN_METHOD, temperature]
                    report["rows"].append(rows.row(method, temperature, measured, plain))
            done.update(method.name for method in group)
            finish_report(report)
            write_json(arguments.json, report)
    finish_report(report)
    _show(report, arguments, plot)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raises ValueError for a number that is out of its range."""
    for name in ("repeats", "batch", "max_tokens"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    budget = arguments.plot_budget
    if budget is not None and budget not in arguments.budgets:
        raise ValueError(f"--plot-budget {budget} is not among --budgets {shown(arguments.budgets)}")


def _models(arguments: argparse.Namespace) -> tuple[Target, Head]:
    path, head_path = arguments.target, arguments.draft_head
    if path == DEMO:
        path, head_path = DEMO_TARGET, head_path or DEMO_DRAFT_HEAD
    if head_path is None:
        raise ValueError(f"--draft-head is missing: trees for {path} need a head that was made for it")
    target = load_target(path, dtype=arguments.dtype)
    if target.tokenizer is None:
        raise ValueError(f"{path} has no tokenizer, so it cannot read prompts")
    return target, load_draft_head(head_path, dtype=arguments.dtype, target=target)


def _show(report: dict[str, Any], arguments: argparse.Namespace, plot: Path) -> None:
    rows = report["rows"]
    budget = arguments.plot_budget or max(row["budget"] for row in rows if row["algorithm"])
    given = report["arguments"]
    title = (
        f"{given['target']}: {given['num_prompts']} prompts of {given['prompts']} x {given['max_tokens']} "
        f"tokens, batch {given['batch']}, {report['dtype']}, {report['device']}, JAX {report['jax']}"
    )
    *tables, (heading, last) = tables_of(rows, budget)
    print(f"\n{title}")
    for table in tables:
        show(*table)
    show(heading, last, report["notes"])
    plot_decode(rows, title, budget, plot)
    print(f"wrote {plot}")
