"""``python -m bench decode``: plain decoding, a chain, and trees of many kinds, on one set of prompts.

Methods are measured in one group per budget. Every group measures plain decoding again, so a speed-up is over
plain decoding of the same minutes. With ``--together`` all methods are one group, and they alternate after a
few prompts instead of after all: so often that a slow period of the machine affects all methods alike. The
report is written after each run of a group. ``--resume`` measures the methods without all of their runs.
"""

import argparse
import itertools

from bench.common.given_profile import describe_profile
from bench.common.methods import PLAIN_METHOD, choose_algorithms, choose_methods
from bench.common.options import add_switch
from bench.common.pair import (
    add_pair_arguments,
    add_trees_arguments,
    check_numbers,
    check_trees,
    describe_pair,
    load_pair,
    read_prompts,
)
from bench.common.report import add_report_arguments, check_report, measured_on, publish
from bench.common.workload import make_workloads
from bench.decode.measure import Bench
from bench.decode.record import begin_report, finish_report, finished_methods, with_measured
from bench.decode.report import Rows, tables_of
from jetspec_jax import enable_compilation_cache
from jetspec_jax.checkpoint.files import write_json
from jetspec_jax.cli.options import MODELS
from jetspec_jax.progress import Progress


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    add_pair_arguments(parser, prompts=8, max_tokens=128)
    add_trees_arguments(parser, temperatures=[0.0], budgets=[16, 32, 64, 128])
    add = parser.add_argument
    MODELS.add(parser, ["width", "candidates"])
    add("--batch", type=int, default=1, help="prompts decoded at a time (default: 1)")
    add("--repeats", type=int, default=3, help="timed runs, interleaved (default: 3)")
    add_switch(
        parser, "--together", "all methods alternate after a few prompts; the device holds the stores of all"
    )
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add_report_arguments(parser, "decode")
    add(
        "--resume",
        action="store_true",
        help="continue the report at --json: measure the methods that it lacks",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measures, prints the tables, and writes the JSON and the plot."""
    check_numbers(arguments, "width", "candidates", "repeats", "batch")
    check_trees(arguments)
    check_report(arguments)
    algorithms = choose_algorithms(arguments.algorithms, arguments.algorithm_option, arguments.profile)
    prompts = read_prompts(arguments)
    enable_compilation_cache(arguments.compilation_cache)
    target, head = pair = load_pair(arguments, arguments.dtype)
    groups = choose_methods(
        target, head, algorithms, arguments.budgets, arguments.width, arguments.candidates
    )
    works = make_workloads(arguments, target, prompts, arguments.temperatures, batch=arguments.batch)
    about = {**describe_pair(pair, works.values()), **describe_profile(arguments.profile)}
    report = begin_report(arguments, about)
    bench = Bench(
        target,
        head,
        works,
        batch=arguments.batch,
        implementation=arguments.implementation,
        together=arguments.together,
    )
    rows = Rows(target, works, head.config.depth)

    done = finished_methods(report["rows"], arguments.repeats)
    groups = [[method for method in group if method.name not in done] for group in groups]
    if arguments.together:
        groups = [list(itertools.chain.from_iterable(groups))]
    groups = [[PLAIN_METHOD, *group] for group in groups if group]
    if groups:
        bench.check(groups[-1])
    prompts_of_all = arguments.repeats * sum(len(work.ids) for work in works.values())
    with Progress(total=sum(map(len, groups)) * prompts_of_all, unit=" prompts") as bar:

        def step(name: str, prompts: int) -> None:
            bar.set_description(name)
            bar.update(prompts)

        for group in groups:
            for found in bench.measure(group, arguments.repeats, step):
                bar.set_description("compare")
                measured = [
                    rows.row(method, temperature, runs, found[PLAIN_METHOD, temperature])
                    for (method, temperature), runs in found.items()
                    if method.name not in done
                ]
                report["rows"] = with_measured(report["rows"], measured)
                finish_report(report)
                write_json(arguments.json, report)
            done.update(method.name for method in group)
    finish_report(report)
    given = report["arguments"]
    title = (
        f"{given['target']}: {given['num_prompts']} prompts of {given['prompts']} x {given['max_tokens']} "
        f"tokens, batch {given['batch']}, {measured_on(report)}"
    )
    publish(arguments, report, tables_of(report["rows"]), report["notes"], title=title)
    return 0
