"""The command ``jetspec-jax``."""

from jetspec_jax.cli import command
from jetspec_jax.cli.process import run_interruptibly

__all__ = ["main"]


def main() -> int:
    """The command as a process of its own; returns its exit code."""
    return run_interruptibly(command.main)
