"""Standard error is for what the command has to say: other libraries report errors there, not notices."""

import logging
import os
import sys
import warnings

from jetspec_jax.arguments import printable

# Read by the libraries themselves, when they are imported or first log; what a user has set is left alone.
_LEVELS = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_VERBOSITY": "error"}


class _ToStderr(logging.Handler):
    """Says on standard error what this package logs."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"jetspec-jax: {printable(record.getMessage())}", file=sys.stderr)


_TO_STDERR = _ToStderr()


def show_own_log() -> None:
    """Has this package's log on standard error, under the command's name; a second call changes nothing."""
    own = logging.getLogger("jetspec_jax")
    own.addHandler(_TO_STDERR)
    own.setLevel(logging.WARNING)  # whatever the level of other libraries


def keep_libraries_quiet() -> None:
    """Hides other libraries' notices and warnings in this process.

    ``python -W default`` brings Python's warnings back.
    """
    for name, level in _LEVELS.items():
        os.environ.setdefault(name, level)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    # The library of Orbax and JAX, which gives its logger a level of its own.
    logging.getLogger("absl").setLevel(logging.ERROR)
    own = logging.getLogger("jetspec_jax")
    own.setLevel(logging.WARNING)  # which the root logger no longer gives it
    own.propagate = False
