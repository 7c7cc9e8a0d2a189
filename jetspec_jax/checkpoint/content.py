"""Reads and checks the small files of a checkpoint; errors name the file."""

import contextlib
import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetspec_jax.config import read_json
from jetspec_jax.config.fields import CONFIG, INDEX, LARGE, TEMPLATE, Bound, check_size

#: Files of a checkpoint that are read whole: configs, indices, and tokenizers.
SMALL_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model")
# Those of them that have the bounds of configs.
_CONFIGS = (
    *("*config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.json"),
    "orbax.json",
)
_TEMPLATES, _INDICES = "*.jinja", "*.index.json"
#: The subfolder in which transformers keeps further templates.
TEMPLATE_FOLDER = "additional_chat_templates"


class CheckpointError(ValueError):
    """A checkpoint's file is invalid; the message names the file."""


@contextlib.contextmanager
def content_of(path: str | Path, *errors: type[Exception]) -> Iterator[None]:
    """Converts errors that occur while a file is read into `CheckpointError`.

    The path is prepended to messages that do not contain it.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, RecursionError, *errors) as error:
        text = str(error) or type(error).__name__
        raise CheckpointError(text if str(path) in text else f"{path}: {text}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file with a JSON object."""
    check_regular(path)
    with content_of(path):
        return read_json(path, _bound(path))


def check_regular(path: Path) -> None:
    """Refuses an existing path that is not a regular file; reading a pipe could block for ever."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}, not a file")


def small_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that are read whole, sorted by name.

    They are checked here because other libraries read them without checking size or kind.
    """
    found = []
    for path in sorted([*folder.iterdir(), *(folder / TEMPLATE_FOLDER).glob("*")]):
        if not path.is_dir() and any(fnmatch.fnmatch(path.name, pattern) for pattern in SMALL_PATTERNS):
            check_small(path)
            found.append(path)
    return found


def check_small(path: Path, bound: Bound | None = None) -> None:
    """Checks size and kind of a file that will be read whole; None is the bound of files of its name."""
    check_regular(path)
    if path.exists():
        with content_of(path):
            check_size(path, bound or _bound(path))


def _bound(path: Path) -> Bound:
    for pattern, bound in ((_INDICES, INDEX), (_TEMPLATES, TEMPLATE)):
        if fnmatch.fnmatch(path.name, pattern):
            return bound
    return CONFIG if any(fnmatch.fnmatch(path.name, pattern) for pattern in _CONFIGS) else LARGE
