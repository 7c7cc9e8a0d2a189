"""What a checkpoint's files hold: read by name, and refused by name."""

import contextlib
import fnmatch
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetspec_jax.config import read_json
from jetspec_jax.config.fields import check_size

#: Files of a checkpoint that are read whole: configs, indices, and what tokenizers need.
SMALL_PATTERNS = ("*.json", "*.txt", "*.jinja", "*.model")
#: The subfolder in which transformers keeps further templates.
TEMPLATE_FOLDER = "additional_chat_templates"


class CheckpointError(ValueError):
    """A checkpoint's file does not hold what it should; the message names the file."""


@contextlib.contextmanager
def content_of(path: str | Path, *errors: type[Exception]) -> Iterator[None]:
    """Makes complaints about a file's content out of what is raised while it is read.

    Args:
        path: The file, or the checkpoint's folder; named where the complaint does not.
        *errors: What the reader raises besides ValueError.

    Raises:
        CheckpointError: Instead of them.
    """
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, RecursionError, *errors) as error:
        text = str(error) or type(error).__name__
        raise CheckpointError(text if str(path) in text else f"{path}: {text}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Reads a file that holds a JSON object.

    Raises:
        CheckpointError: It does not, or it is no regular file.
        OSError: It is not there, or cannot be read.
    """
    check_regular(path)
    with content_of(path):
        return read_json(path)


def check_regular(path: Path) -> None:
    """Refuses what is there and is no file: a folder, or a pipe, which nobody may ever write to.

    Raises:
        CheckpointError: It is none.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is {'a folder' if path.is_dir() else 'no regular file'}, not a file")


def small_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that are read whole, in order of their names.

    Other libraries read them too, without a look at their size or kind.

    Raises:
        CheckpointError: One is too large, or no regular file.
    """
    found = []
    for path in sorted([*folder.iterdir(), *(folder / TEMPLATE_FOLDER).glob("*")]):
        if not path.is_dir() and any(fnmatch.fnmatch(path.name, pattern) for pattern in SMALL_PATTERNS):
            check_small(path)
            found.append(path)
    return found


def check_small(path: Path) -> None:
    """Refuses a file that is to be read whole if it is too large or no regular file.

    Raises:
        CheckpointError: It is.
    """
    check_regular(path)
    if path.exists():
        with content_of(path):
            check_size(path)
