"""The command ``jetspec-jax``."""

from jetspec_jax.cli.command import main

__all__ = ["main"]
