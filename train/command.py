"""The command ``python -m train``."""

import sys
from collections.abc import Sequence

from jetspec_jax import enable_compilation_cache
from jetspec_jax.arguments import printable
from jetspec_jax.cli.options import join_as_told
from jetspec_jax.cli.parser import Parser
from jetspec_jax.cli.quiet import show_own_log
from jetspec_jax.device.joining import leave
from train.data import command as data
from train.head import calibrate
from train.head import command as head
from train.loop.stages import OutOfTime
from train.pair import command as pair

#: Commands of earlier versions, and what replaced them.
REPLACED = {
    "ablations": "`python -m train head --set objective.loss=LOSS` trains and evaluates a head with a loss",
    "demo": "`python -m train data --prompts FOLDER` makes documents from a corpus, and `python -m train "
    "head --recipe demo` a head; jetspec_jax/demo/README.md names the commits that made the demo pair",
    "smollm2": "`python -m train pair --target smollm2 --recipe train/configs/smollm2-pair.toml`",
    "manifest": "`python -m train data --prompts FOLDER` reads a corpus, without a list of its files",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code.

    0: done, or stopped cleanly by a time limit. 2: an error. 3: a finished head that did not improve on its
    initial weights. 130: interrupted.
    """
    show_own_log()
    parser = Parser(prog="python -m train", description="Training of draft heads.")
    parser.add_argument(
        "--compilation-cache",
        default="auto",
        metavar="DIR|auto|off",
        help="where compiled programs are kept (default: auto, on a GPU the user's cache folder)",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in (data, head, calibrate, pair):
        module.add_command(commands)
    parser.refuse_replaced(sys.argv[1:] if arguments is None else arguments, REPLACED)
    parsed = parser.parse_args(arguments)
    try:
        join_as_told(parsed)
        enable_compilation_cache(parsed.compilation_cache, together=True)
        return parsed.run(parsed)
    except OutOfTime as stop:
        print(f"{stop}; the same command goes on")
        return 0
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError, RuntimeError, FloatingPointError) as error:
        print(f"train: {printable(str(error))}", file=sys.stderr)
        leave(str(error), 2)
        return 2
