"""The command ``jetspec-jax``: generates text, chats, shows trees, describes checkpoints, and serves."""

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
from jetspec_jax.cli.options import DOCS, join_as_told
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
        with contextlib.nullcontext() if alone() else _output_of_first_process():
            code = arguments.run(arguments)
        print(end="", flush=True)  # raises BrokenPipeError here, and not while Python shuts down
    except BrokenPipeError:
        _discard_output()
        return 141  # the reader has closed the pipe, as `head` does
    except KeyboardInterrupt:
        return 130
    except (ValueError, TypeError, OSError, RuntimeError, ImportError, MemoryError) as error:
        # Code 1 means a failed check, so other failures have code 2.
        message = printable(str(error)) or type(error).__name__
        print(f"jetspec-jax: {message}", file=errors)
        leave(message, 2)
        return 2
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="jetspec-jax",
        description="Tree speculative decoding in JAX.",
        epilog='For example: jetspec-jax generate "def copy(self):" --budget 8 --stats. '
        f"Options of a command: jetspec-jax COMMAND --help. All commands: {DOCS}/command-line.md",
    )
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
def _output_of_first_process() -> Iterator[None]:
    """Lets only the first of several processes print. Errors are printed by each process, outside of this.

    Libraries that connect devices write to file descriptor 1 directly, so it is redirected to standard error.
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
    """Discards unwritten output: Python would try to write it at exit, and print an error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
