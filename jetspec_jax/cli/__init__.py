"""The command ``jetspec-jax``."""

from collections.abc import Sequence

from jetspec_jax.cli import command
from jetspec_jax.cli.quiet import keep_libraries_quiet

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Without ``argv`` the process is its, and is kept quiet."""
    if argv is None:
        keep_libraries_quiet()
    return command.main(argv)
