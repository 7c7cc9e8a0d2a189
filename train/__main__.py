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
    # Slow imports happen here, in a worker thread, so that the main thread can handle an interrupt.
    from jetspec_jax.cli.quiet import keep_libraries_quiet

    keep_libraries_quiet("asyncio")  # it logs every failed write of Orbax; the first one is raised
    from train.command import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
