"""The command ``jetspec-jax``."""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Without ``argv`` it runs as the process's program."""
    if argv is not None:
        from jetspec_jax.cli import command

        return command.main(argv)
    try:
        from jetspec_jax.cli.process import run_program

        return run_program(_main)
    except KeyboardInterrupt:
        return 130


def _main() -> int:
    # Slow imports happen in this thread, so that the main thread can answer an interrupt.
    from jetspec_jax.cli.quiet import keep_libraries_quiet

    keep_libraries_quiet()
    from jetspec_jax.cli import command

    return command.main()
