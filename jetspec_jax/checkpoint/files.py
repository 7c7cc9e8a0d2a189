"""Files that are written whole or not at all, in the place of other files only."""

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


def refuse_existing(folder: Path) -> None:
    """Checks that a folder to be written is a new one.

    Raises:
        FileExistsError: It exists.
    """
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} exists; name a new folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to write into, which gets its name when all is written and is removed otherwise.

    A process that is killed leaves it there; the next one that writes the same folder removes what it holds.

    Raises:
        FileExistsError: The folder exists, or another process is writing it.
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
            partial.chmod(0o755)  # it was made the owner's alone
            partial.rename(folder)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno is not None and error.filename is None:
                error.filename = str(folder)  # a full disk is reported without a name
            raise


def is_inside(name: str) -> bool:
    """Whether a name, with folders or without, stays in the folder that it is relative to, on any system."""
    paths = PurePosixPath(name), PureWindowsPath(name)
    return not any(path.anchor or ".." in path.parts for path in paths)


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Writes small files by their names, which may have folders in them; text is UTF-8."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def _place(path: Path) -> Path:
    """Where the file goes, through links, which stay; never in the place of a folder or of /dev/null."""
    if path.exists() and not path.is_file():
        raise OSError(f"cannot write {path}: it is {'a folder' if path.is_dir() else 'no regular file'}")
    return path.resolve()


@contextmanager
def _held(partial: Path, folder: Path) -> Iterator[None]:
    """Holds a folder, which is made if there is none, against other processes; the system frees it with ours.

    Raises:
        FileExistsError: Another process holds it, or may hold it where the system cannot tell.
    """
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
            # Its writer may have finished in between, and what is held be gone or have its name.
            if partial.exists() and os.path.samestat(os.fstat(handle), partial.stat()):
                yield
                return
        finally:
            os.close(handle)
