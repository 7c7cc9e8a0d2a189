"""Files that are written whole or not at all, in the place of other files only."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    """A partial file beside ``path``, which takes its place once it is written; makes the folder.

    Raises:
        OSError: It cannot be written, or what is there is no regular file.
    """
    place = _place(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    partial = place.with_name(place.name + ".partial")
    try:
        yield partial
        partial.rename(place)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def _place(path: Path) -> Path:
    """Where the file goes, through links, which stay; never in the place of a folder or of /dev/null."""
    if path.exists() and not path.is_file():
        raise OSError(f"cannot write {path}: it is {'a folder' if path.is_dir() else 'no regular file'}")
    return path.resolve()
