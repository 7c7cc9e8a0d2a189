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
        extra: The package's extra with the module's dependencies.
    """

    module: str
    summary: str
    extra: str = "bench"


COMMANDS = {
    "decode": Command("bench.decode.command", "plain decoding, a chain, and trees"),
    "exactness": Command(
        "bench.exactness.command", "every output of a tree that differs from plain decoding's"
    ),
    "acceptance": Command(
        "bench.acceptance.command", "tokens per round by tree algorithm, candidates and budget"
    ),
    "profile": Command("bench.acceptance.profile", "acceptance by depth and rank, for tree algorithms"),
    "diagnose": Command("bench.acceptance.diagnose", "faithfulness of a head's drafts, and accepted nodes"),
    "round": Command("bench.round.command", "one round and its phases, with the floor"),
    "kernel": Command(
        "bench.kernel.command", "one layer's tree attention, experts or matrix products, with the floor"
    ),
    "load": Command("bench.load.command", "an engine under load: latency, prefill, rounds of many slots"),
    "loading": Command("bench.loading.command", "seconds and memory to load a checkpoint"),
    "startup": Command("bench.startup", "seconds until a server's engine answers, and until it is warm"),
    "serve": Command(
        "bench.serve.command", "a server under load, measured by clients over HTTP", "bench,serve"
    ),
    "collectives": Command("bench.collectives", "sums over devices, in a loop on the devices"),
    "plots": Command("bench.plots", "redraws kept reports and the README's pictures"),
    "page": Command("bench.page", "rewrites the tables of docs/real-model.md from kept reports"),
    "train": Command(
        "bench.train_step",
        "one training step of a draft head, with its share of the matmul rate",
        extra="train,bench",
    ),
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
        subparser.set_defaults(run=module.run)
        module.add_arguments(subparser)
    arguments = parser.parse_args(words)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
