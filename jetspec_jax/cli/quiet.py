"""Keeps other libraries' notices and warnings off standard error."""

import logging
import os
import sys
import warnings
from typing import Any

from jetspec_jax.arguments import printable

# The libraries read these when they are imported or first log. Values set by the user are kept.
_LEVELS = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_VERBOSITY": "error"}


class _ToStderr(logging.Handler):
    """Prints this package's log to standard error."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"jetspec-jax: {printable(record.getMessage())}", file=sys.stderr)


_TO_STDERR = _ToStderr()


def show_own_log() -> None:
    """Prints this package's log to standard error with the command's name; idempotent."""
    logger = logging.getLogger("jetspec_jax")
    logger.addHandler(_TO_STDERR)
    logger.setLevel(logging.WARNING)  # independent of the root logger's level


def _of_python(found: Any) -> None:
    """Prints an error that cannot be caught, except those without a Python object.

    Errors without an object come from threads of C++ libraries. Orbax starts several writes at once and
    raises the first error; the errors of other writes come later, when nothing waits for them.
    """
    if found.object is not None or found.err_msg is not None:
        sys.__unraisablehook__(found)


def keep_libraries_quiet(*silent: str) -> None:
    """Hides other libraries' notices and warnings in this process.

    ``python -W default`` brings Python's warnings back.

    Errors of ``silent`` loggers are hidden too, because they are also raised.
    """
    for name, level in _LEVELS.items():
        os.environ.setdefault(name, level)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    # Orbax logs its errors to absl, with tracebacks from several threads, and raises them too.
    for name in ("absl", *silent):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _of_python
    logger = logging.getLogger("jetspec_jax")
    logger.setLevel(logging.WARNING)  # no longer inherited from the root logger
    logger.propagate = False
