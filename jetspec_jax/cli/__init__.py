"""The command ``jetspec-jax``."""

from collections.abc import Sequence

from jetspec_jax.cli import command
from jetspec_jax.cli.process import run_interruptibly
from jetspec_jax.cli.quiet import keep_libraries_quiet
from jetspec_jax.device.joining import tell_of_interrupt

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Without ``argv`` the whole process is the command's."""
    if argv is not None:
        return command.main(argv)
    keep_libraries_quiet()
    return run_interruptibly(command.main, tell=tell_of_interrupt)
