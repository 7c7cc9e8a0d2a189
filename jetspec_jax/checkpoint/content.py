"""What a checkpoint's files hold: read by name, and refused by name."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetspec_jax.config import read_json


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
