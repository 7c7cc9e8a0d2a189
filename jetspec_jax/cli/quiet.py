"""Standard error is for what the command has to say: other libraries report errors there, not notices."""

import logging
import os
import sys
import warnings
from typing import Any

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


def _of_python(found: Any) -> None:
    """Shows an error that nobody can catch, unless it names no Python object.

    Errors without one come from the threads of C++ libraries. Orbax begins several writes at once and raises
    the first error; the other writes end later, when nothing waits for them any more.
    """
    if found.object is not None or found.err_msg is not None:
        sys.__unraisablehook__(found)


def keep_libraries_quiet(*silent: str) -> None:
    """Hides other libraries' notices and warnings in this process.

    ``python -W default`` brings Python's warnings back.

    Args:
        *silent: Loggers whose errors are hidden too, as they are raised as well.
    """
    for name, level in _LEVELS.items():
        os.environ.setdefault(name, level)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    # Orbax logs to absl, with a traceback and from several threads, what it raises as well.
    for name in ("absl", *silent):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.unraisablehook = _of_python
    own = logging.getLogger("jetspec_jax")
    own.setLevel(logging.WARNING)  # which the root logger no longer gives it
    own.propagate = False
