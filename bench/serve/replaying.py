"""A server with an engine that replays, as a process: ``python -m bench.serve.replaying --help``.

It has the options of ``jetspec-jax serve``. It answers each line on its standard input with a line on its
standard error: the processor seconds of the process and of the engine's steps.
"""

import argparse
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence

from bench.common.options import check_known
from bench.load.published import TAU
from bench.serve.replayed import RECORDED, ReplayedEngine, replay
from jetspec_jax import AsyncLLM
from jetspec_jax.cli.parser import Parser
from jetspec_jax.cli.server_options import ENGINE, SERVER
from jetspec_jax.cli.serving import add_serve_command
from jetspec_jax.cli.settings import model_arguments
from jetspec_jax.serve.running import Stopping, run
from jetspec_jax.serve.settings import ServeSettings

#: The start of each answer's line.
MARK = "replayed:"


def add_replay_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the replay."""
    parser.add_argument(
        "--recorded",
        nargs="+",
        default=list(RECORDED),
        metavar="REPORT",
        help="reports of `bench round` to replay (default: Qwen3-8B's shapes on one H200)",
    )
    parser.add_argument(
        "--task",
        default="gsm8k",
        help=f"prompt set of the published acceptance: {', '.join(TAU)} (default: gsm8k)",
    )


def main(words: Sequence[str]) -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = Parser(prog="python -m bench.serve.replaying", description=__doc__)
    commands = parser.add_subparsers()
    add_serve_command(commands)
    add_replay_arguments(commands.choices["serve"])
    arguments = parser.parse_args(["serve", *words])
    check_known("task", [arguments.task], TAU)
    given = model_arguments(arguments) | ENGINE.given(arguments)
    stopping = Stopping()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopping(received))

    def make() -> AsyncLLM:
        llm = AsyncLLM(**given)
        engine = replay(llm, given, arguments.recorded, arguments.task)
        threading.Thread(target=report_spent, args=(engine,), daemon=True).start()
        return llm

    settings = ServeSettings(**{**SERVER.given(arguments), "warm_up": "none"})
    run(make, settings, name="replayed", capacity=given.get("capacity"), stopping=stopping)


def report_spent(engine: ReplayedEngine) -> None:
    """Prints the processor seconds so far for each line on the standard input."""
    for _ in sys.stdin:
        spent = {"process": time.process_time(), "engine": engine.thread_seconds}
        print(MARK, json.dumps(spent), file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
