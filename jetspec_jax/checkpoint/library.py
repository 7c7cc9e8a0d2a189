"""Imports transformers without its advice to install PyTorch, which is not needed here."""

import logging
from types import ModuleType


def import_transformers() -> ModuleType:
    """The module ``transformers``; the first import takes about a second.

    Its log of the import is shown, except for the advice about PyTorch.
    """
    logger = logging.getLogger("transformers")
    logger.addFilter(_is_no_advice)
    try:
        import transformers
    finally:
        logger.removeFilter(_is_no_advice)
    return transformers


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("PyTorch was not found")
