"""transformers, imported without its advice to install PyTorch, which nothing here needs."""

import contextlib
import logging
from collections.abc import Iterator
from types import ModuleType

_ADVICE = "PyTorch was not found"


def import_transformers() -> ModuleType:
    """The library, which takes a second to import."""
    with without_advice():
        import transformers
    return transformers


@contextlib.contextmanager
def without_advice() -> Iterator[None]:
    """Hides what transformers logs on PyTorch while it is imported; all else that it logs is shown."""
    own = logging.getLogger("transformers")
    own.addFilter(_is_no_advice)
    try:
        yield
    finally:
        own.removeFilter(_is_no_advice)


def _is_no_advice(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_ADVICE)
