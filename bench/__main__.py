"""``python -m bench COMMAND``: see ``python -m bench --help``."""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A command: a module with ``add_arguments`` and ``run``, imported when the command is chosen.

    Attributes:
        module: The module, whose docstring describes the command.
        summary: The line in the list of commands.
        page: The page that needs the command's reports, pictures or tables.
        extra: The package's extra with the module's dependencies.
    """

    module: str
    summary: str
    page: str
    extra: str = "bench"


COMMANDS = {
    "decode": Command("bench.decode.command", "plain decoding, a chain, and trees", "docs/real-model.md"),
    "exactness": Command(
        "bench.exactness.command",
        "every output of a tree that differs from plain decoding's",
        "docs/exactness.md",
    ),
    "acceptance": Command(
        "bench.acceptance.command",
        "tokens per round by tree algorithm, candidates and budget",
        "docs/real-model.md",
    ),
    "profile": Command(
        "bench.acceptance.profile",
        "acceptance by depth and rank, for tree algorithms",
        "docs/algorithms.md",
    ),
    "round": Command("bench.round.command", "one round and its phases, with the floor", "docs/benchmarks.md"),
    "kernel": Command(
        "bench.kernel.command",
        "one layer's tree attention, experts or matrix products, with the floor",
        "docs/benchmarks.md",
    ),
    "load": Command(
        "bench.load.command", "an engine under load: latency, prefill, many slots", "docs/benchmarks.md"
    ),
    "startup": Command(
        "bench.startup",
        "seconds until a server's engine answers, and until it is warm",
        "docs/benchmarks.md",
    ),
    "serve": Command(
        "bench.serve.command",
        "a server under load, measured by clients over HTTP",
        "docs/benchmarks.md",
        "bench,serve",
    ),
    "plots": Command("bench.plots", "redraws kept reports and the README's pictures", "docs/benchmarks.md"),
    "page": Command("bench.page", "rewrites the tables of a page from kept reports", "docs/real-model.md"),
    "train": Command(
        "bench.train_step",
        "one training step of a draft head, with its share of the matmul rate",
        "docs/training.md",
        "train,bench",
    ),
}
_ORACLE = "leave it out: reports have where rounds end, at no candidate or at no child"
_PROJECTED = "`--parts demo` and `--parts traffic` measure tokens per second"
_REPLAYED = "`python -m bench serve` measures a server of the demo pair, or any with `--url`"
#: Commands, options and parts of earlier versions, and what replaced them.
REPLACED = {
    **dict.fromkeys(("acceptance --oracle", "acceptance --no-oracle"), _ORACLE),
    "collectives": "`python -m bench round --tensor-parallel-size 2 --profile` shows the time of sums",
    "decode --plot-budget": "acceptance by depth is of the largest of `--budgets`",
    "diagnose": "`python -m bench acceptance` shows where rounds end, `python -m bench profile` the ranks",
    "loading": "`python -m bench startup` measures a server's start, after the models are loaded",
    "load projected": _PROJECTED,
    "load rounds": "`python -m bench round --batches` measures rounds of several slots",
    **dict.fromkeys(("load --tasks", "load --context", "load --rounds", "load --most-rows"), _PROJECTED),
    **dict.fromkeys(("serve --replay", "serve --no-replay", "serve --recorded", "serve --task"), _REPLAYED),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code. Without ``argv`` it runs as the process's program."""
    if argv is not None:
        return _run(list(argv))
    try:
        from jetspec_jax.cli.process import run_program

        return run_program(lambda: _run(sys.argv[1:]), "bench: interrupted")
    except KeyboardInterrupt:
        return 130


def _run(words: Sequence[str]) -> int:
    from jetspec_jax.cli.parser import Parser

    parser = Parser(prog="python -m bench", description="Benchmarks of jetspec_jax.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parser.refuse_replaced(words, REPLACED)
    for name, command in COMMANDS.items():
        subparser = commands.add_parser(name, help=command.summary)
        if words[:1] != [name]:
            continue
        try:
            module = importlib.import_module(command.module)
        except ModuleNotFoundError as error:
            needed = f'{error.name}, which is not installed: pip install "jetspec-jax[{command.extra}]"'
            print(f"bench: {name} needs {needed}", file=sys.stderr)
            return 2
        subparser.description = module.__doc__
        from bench.plots import draw_kept

        subparser.set_defaults(run=module.run, draw=draw_kept)
        module.add_arguments(subparser)
    arguments = parser.parse_args(words)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
