"""The command ``jetspec-jax``."""

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code. Without ``argv`` the whole process is the command's."""
    if argv is not None:
        from jetspec_jax.cli import command

        return command.main(argv)
    try:
        from jetspec_jax.cli.process import run_program

        return run_program(_main)
    except KeyboardInterrupt:
        return 130


def _main() -> int:
    # What takes long is imported here: the main thread waits meanwhile, and answers an interrupt.
    from jetspec_jax.cli.quiet import keep_libraries_quiet

    keep_libraries_quiet()
    from jetspec_jax.cli import command

    return command.main()
