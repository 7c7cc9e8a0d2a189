"""``python -m convert SOURCE DESTINATION``: see ``python -m convert --help``."""

import sys


def main() -> int:
    """Runs the command as the process's program; returns its exit code."""
    try:
        from jetspec_jax.cli.process import run_program

        return run_program(_main, "convert: interrupted")
    except KeyboardInterrupt:
        return 130


def _main() -> int:
    from convert.command import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
