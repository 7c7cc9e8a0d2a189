"""``python -m bench COMMAND``: see ``python -m bench --help``."""

import argparse
import sys
from collections.abc import Sequence

from bench import train_step
from bench.acceptance import diagnose, profile
from bench.decode import command as decode
from bench.exactness import command as exactness
from bench.kernel import command as kernel
from bench.round import command as round


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench", description="Benchmarks of jetspec_jax.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    decode.add_command(commands)
    exactness.add_command(commands)
    profile.add_command(commands)
    diagnose.add_command(commands)
    round.add_command(commands)
    kernel.add_command(commands)
    train_step.add_command(commands)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
