"""``python -m jetspec_jax``: the command ``jetspec-jax``."""

import sys

from jetspec_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
