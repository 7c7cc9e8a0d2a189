"""Imports transformers without its advice to install PyTorch, which is not needed here."""

import contextlib
import logging
from collections.abc import Iterator
from types import ModuleType

_ADVICE = "PyTorch was not found"


def import_transformers() -> ModuleType:
    """The module ``transformers``; the first import takes about a second."""
    with without_advice():
        import transformers
    return transformers


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Hides the advice about PyTorch that transformers logs when it is imported; other logs are shown."""
    logger = logging.getLogger("transformers")
    logger.addFilter(_is_no_advice)
    try:
        yield
    finally:
        logger.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_ADVICE)
