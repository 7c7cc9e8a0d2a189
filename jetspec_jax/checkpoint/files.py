"""Files that are written whole or not at all, in the place of other files only."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def check_writable(path: Path, *, make_folder: bool = False) -> None:
    """Finds out whether a file can be written there, before there is anything to write.

    Args:
        path: The file.
        make_folder: Whether its folder is made if there is none.

    Raises:
        OSError: It cannot, or what is there is no regular file.
    """
    folder = _place(path).parent
    try:
        if make_folder and not folder.exists():
            folder.mkdir(parents=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        # The error names a temporary file, or a folder: nothing that was asked for.
        raise OSError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A partial file beside ``path``, which takes its place once its bytes are on the disk; makes the folder.

    So neither an error nor a crash leaves an empty file or half of one there.

    Raises:
        OSError: It cannot be written, or what is there is no regular file.
    """
    place = _place(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(place.name + ".partial")
    try:
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Writes a text file; as `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes what JSON can say, for people too; as `replacing`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def _place(path: Path) -> Path:
    """Where the file goes, through links, which stay; never in the place of a folder or of /dev/null."""
    if path.exists() and not path.is_file():
        raise OSError(f"cannot write {path}: it is {'a folder' if path.is_dir() else 'no regular file'}")
    return path.resolve()
