"""The command ``jetspec-jax``: generate text, see trees, and look at checkpoints."""

import argparse
import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from typing import NoReturn

import flax
import jax

import jetspec_jax
from jetspec_jax.cli.completion import add_completion_option
from jetspec_jax.cli.generating import add_generate_command
from jetspec_jax.cli.info import add_info_command
from jetspec_jax.cli.options import join_as_told
from jetspec_jax.cli.quiet import show_own_log
from jetspec_jax.cli.view import add_tree_command
from jetspec_jax.device.joining import leave
from jetspec_jax.device.processes import is_first

VERSIONS = (
    f"jetspec-jax {jetspec_jax.__version__} (JAX {jax.__version__}, Flax {flax.__version__}, "
    f"Python {platform.python_version()})"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    show_own_log()
    errors = sys.stderr
    try:
        arguments = _parser().parse_args(argv)
        join_as_told(arguments)
        with contextlib.nullcontext() if is_first() else _silence():
            code = arguments.run(arguments)
        print(end="", flush=True)  # a reader that left is noticed here, not while Python ends
    except BrokenPipeError:
        _discard_output()
        return 141  # the reader left, as `head` does
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError) as error:
        # Code 1 is a failed check, so no other failure may have it.
        said = str(error) or type(error).__name__
        print(f"jetspec-jax: {said}", file=errors)
        leave(said, 2)
        return 2
    return code


class _Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with a command line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jetspec-jax", description="Tree speculative decoding in JAX.")
    parser.add_argument("--version", action="version", version=VERSIONS)
    add_completion_option(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_generate_command(commands)
    add_tree_command(commands)
    add_info_command(commands)
    return parser


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """What this process prints is what the first prints; its errors are its own, and are not said in here."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        yield


def _discard_output() -> None:
    """Sends what is left of the output nowhere: Python would try once more, and complain, when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
