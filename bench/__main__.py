"""``python -m bench COMMAND``: see ``python -m bench --help``."""

import importlib
import sys
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """Where a command lives: a module with ``add_arguments`` and ``run``, imported when it is chosen.

    Attributes:
        module: Its docstring describes the command.
        summary: One line for the list of all commands.
        extra: Of this package, with everything that the module imports.
    """

    module: str
    summary: str
    extra: str = "bench"


COMMANDS = {
    "decode": Command("bench.decode.command", "plain decoding, a chain, and trees"),
    "exactness": Command("bench.exactness.command", "every token where a tree and plain decoding part"),
    "acceptance": Command(
        "bench.acceptance.command", "tokens per round by tree algorithm, candidates and budget"
    ),
    "profile": Command("bench.acceptance.profile", "acceptance by depth and rank, for tree algorithms"),
    "diagnose": Command("bench.acceptance.diagnose", "faithfulness of a head's drafts, and what is accepted"),
    "round": Command("bench.round.command", "one round, phase by phase, and its floor"),
    "kernel": Command("bench.kernel.command", "one layer's tree attention or experts, and its floor"),
    "load": Command("bench.load.command", "requests that come over time: waits, gaps, rounds of many slots"),
    "loading": Command("bench.loading.command", "a checkpoint from its files to the devices"),
    "serve": Command(
        "bench.serve.command", "a server under load, as clients see it over HTTP", "bench,serve"
    ),
    "collectives": Command("bench.collectives", "the sums between devices, in a loop on the device"),
    "plots": Command("bench.plots", "draws kept reports again, and the pictures of the README"),
    "page": Command("bench.page", "writes the tables of docs/real-model.md from kept reports"),
    "train": Command(
        "bench.train_step",
        "one training step of a draft head, and its share of the matmul rate",
        extra="train,bench",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code. Without ``argv`` the whole process is the benchmark's."""
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
        own = commands.add_parser(name, help=command.summary)
        if words[:1] != [name]:
            continue
        try:
            module = importlib.import_module(command.module)
        except ModuleNotFoundError as error:
            needed = f'{error.name}, which is not installed: pip install "jetspec-jax[{command.extra}]"'
            print(f"bench: {name} needs {needed}", file=sys.stderr)
            return 2
        own.description = module.__doc__
        own.set_defaults(run=module.run)
        module.add_arguments(own)
    arguments = parser.parse_args(words)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
