"""The command ``jetspec-jax``: generate text, chat, see trees, look at checkpoints, and serve."""

import contextlib
import os
import platform
import sys
from collections.abc import Iterator, Sequence

import flax
import jax

from jetspec_jax.arguments import printable
from jetspec_jax.cli.chatting import add_chat_command
from jetspec_jax.cli.completion import add_completion_option
from jetspec_jax.cli.generating import add_generate_command
from jetspec_jax.cli.info import add_info_command
from jetspec_jax.cli.options import join_as_told
from jetspec_jax.cli.parser import Parser
from jetspec_jax.cli.quiet import show_own_log
from jetspec_jax.cli.serving import add_serve_command
from jetspec_jax.cli.view import add_tree_command
from jetspec_jax.device.joining import leave
from jetspec_jax.device.processes import alone, is_first
from jetspec_jax.version import __version__

VERSIONS = (
    f"jetspec-jax {__version__} (JAX {jax.__version__}, Flax {flax.__version__}, "
    f"Python {platform.python_version()})"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    show_own_log()
    errors = sys.stderr
    try:
        arguments = _parser().parse_args(argv)
        join_as_told(arguments)
        with contextlib.nullcontext() if alone() else _one_voice():
            code = arguments.run(arguments)
        print(end="", flush=True)  # a reader that left is noticed here, not while Python ends
    except BrokenPipeError:
        _discard_output()
        return 141  # the reader left, as `head` does
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError) as error:
        # Code 1 is a failed check, so no other failure may have it.
        said = printable(str(error)) or type(error).__name__
        print(f"jetspec-jax: {said}", file=errors)
        leave(said, 2)
        return 2
    return code


def _parser() -> Parser:
    parser = Parser(prog="jetspec-jax", description="Tree speculative decoding in JAX.")
    parser.add_argument("--version", action="version", version=VERSIONS)
    add_completion_option(parser)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_generate_command(commands)
    add_chat_command(commands)
    add_tree_command(commands)
    add_info_command(commands)
    add_serve_command(commands)
    return parser


@contextlib.contextmanager
def _one_voice() -> Iterator[None]:
    """Of several processes the first prints; errors, which each has of its own, are not said in here.

    Libraries that connect devices print past Python: what they say is no output of this command.
    """
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        if is_first():
            output = stack.enter_context(os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding))
            os.dup2(2, 1)
        else:
            output = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            os.dup2(output.fileno(), 1)
            stack.enter_context(contextlib.redirect_stderr(output))
        stack.enter_context(contextlib.redirect_stdout(output))
        yield


def _discard_output() -> None:
    """Sends what is left of the output nowhere: Python would try once more, and complain, when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
