"""``python -m train COMMAND``: see ``python -m train --help``."""

import sys

INTERRUPTED = "train: interrupted; the same command goes on from the last checkpoint"


def main() -> int:
    """Runs a command as the whole program of this process; returns its exit code."""
    try:
        from jetspec_jax.cli.process import run_program

        return run_program(_main, INTERRUPTED)
    except KeyboardInterrupt:
        return 130


def _main() -> int:
    # What takes long is imported here: the main thread waits meanwhile, and answers an interrupt.
    from jetspec_jax.cli.quiet import keep_libraries_quiet

    keep_libraries_quiet("asyncio")  # which logs all of Orbax's writes that fail; the first is raised
    from train.command import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
