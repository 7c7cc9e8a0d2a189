"""Writes files and folders atomically."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where a folder cannot be locked
    fcntl = None


def check_writable(path: Path, *, make_folder: bool = False) -> None:
    """Checks that a file can be written, before there is anything to write."""
    folder = _place(path).parent
    try:
        if make_folder and not folder.exists():
            folder.mkdir(parents=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        # The error names a temporary file or a folder, not the file of the caller.
        raise OSError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that replaces it once its bytes are on disk; creates the folder.

    Neither an error nor a crash leaves an empty or incomplete file at ``path``.
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
    """Writes a UTF-8 text file atomically, see `replacing`."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON atomically, see `replacing`."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def refuse_existing(folder: Path) -> None:
    """Raises FileExistsError if a folder exists."""
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} exists; name a new folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder that is renamed to ``folder`` on success and removed on an error.

    If the process is killed, the hidden folder stays; the next writer of the same folder clears it.
    """
    refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    with _held(partial, folder):
        try:
            for leftover in partial.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            yield partial
            refuse_existing(folder)
            partial.chmod(0o755)  # it was created with mode 0o700
            partial.rename(folder)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(folder)  # the error of a full disk has no file name
            raise


def is_inside(name: str) -> bool:
    """Whether a relative path stays inside its base folder, on Posix and Windows."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not any(path.anchor or ".." in path.parts for path in paths)


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Writes small files by their relative paths; text is encoded as UTF-8."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _place(path: Path) -> Path:
    """The path with symbolic links resolved, so that links are kept; refuses folders and devices."""
    if path.exists() and not path.is_file():
        raise OSError(f"cannot write {path}: it is {'a folder' if path.is_dir() else 'no regular file'}")
    return path.resolve()


@contextmanager
def _held(partial: Path, folder: Path) -> Iterator[None]:
    """Creates and locks a folder against other processes; the system releases the lock with this process."""
    while True:
        made = not partial.exists()
        partial.mkdir(mode=0o700, exist_ok=True)
        if fcntl is None:
            if not made:
                raise FileExistsError(f"{partial} is there: remove it unless another process writes {folder}")
            yield
            return
        try:
            handle = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue  # its writer has just finished
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FileExistsError(f"another process is writing {folder}") from None
            # The writer may have finished in between; then the locked folder is gone or has been renamed.
            if partial.exists() and os.path.samestat(os.fstat(handle), partial.stat()):
                yield
                return
        finally:
            os.close(handle)
