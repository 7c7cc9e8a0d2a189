"""Checksums of a checkpoint's files, in the format of ``sha256sum``.

The names begin with the checkpoint's folder, so that a folder that was renamed is known as well:
``cd checkpoints && sha256sum -c 500/SHA256SUMS`` checks step 500 by hand.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

#: The file of the checksums, inside the checkpoint's folder.
FILE = "SHA256SUMS"
# Orbax's note of when the checkpoint was written, to which it adds later. Nothing is read by it.
_NOTE = "_CHECKPOINT_METADATA"

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<folder>[^/\n]+)/(?P<name>[^\n]+)")


class ChecksumError(ValueError):
    """A checkpoint's files are not those that were written."""


def write_checksums(folder: Path, name: str) -> None:
    """Writes the checksums of the files of a folder, except for Orbax's own note of when it was written.

    Args:
        folder: The checkpoint, which may still have a temporary name.
        name: The folder's final name.
    """
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    files = sorted(found - {_NOTE})
    digests = zip(files, _digests(folder, files), strict=True)
    lines = [f"{digest}  {name}/{file}\n" for file, digest in digests]
    with (folder / FILE).open("w", encoding="utf-8") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())


def has_checksums(folder: Path) -> bool:
    """Whether a checkpoint has checksums; earlier versions wrote none."""
    return (folder / FILE).exists()


def written_name(folder: Path) -> str:
    """The name that a checkpoint's folder was written with.

    Raises:
        ChecksumError: The checksums are damaged.
        OSError: They cannot be read.
    """
    return _read(folder)[0]


def check_checksums(folder: Path, *, part: int = 0, parts: int = 1) -> None:
    """Compares the files of a checkpoint with its checksums.

    Args:
        folder: The checkpoint.
        part: Which part of the files to compare, from 0, where several processes divide the work.
        parts: The number of parts.

    Raises:
        ChecksumError: A file differs or is missing, or the checksums themselves are damaged.
        OSError: A file cannot be read.
    """
    wanted = _read(folder)[1]
    own = sorted(wanted)[part::parts]
    if missing := [name for name in own if not (folder / name).is_file()]:
        raise ChecksumError(f"{missing[0]} is missing")
    found = zip(own, _digests(folder, own), strict=True)
    if changed := [name for name, digest in found if digest != wanted[name]]:
        more = f", as do {len(changed) - 1} other files" if len(changed) > 1 else ""
        raise ChecksumError(f"{changed[0]} differs from its checksum{more}")


def _read(folder: Path) -> tuple[str, dict[str, str]]:
    """The name that the folder was written with, and its files' digests by name."""
    try:
        *lines, last = (folder / FILE).read_bytes().decode().split("\n")
    except UnicodeDecodeError as error:
        raise ChecksumError(f"{FILE} is not UTF-8") from error
    found = [_LINE.fullmatch(line) for line in lines]
    read = [match.groups() for match in found if match is not None]
    names = {name for _, name, _ in read}
    if last or len(read) < len(lines) or len(names) != 1:
        raise ChecksumError(f"{FILE} does not hold the checksums of one folder")
    return names.pop(), {file: digest for digest, _, file in read}


def _digests(folder: Path, names: Iterable[str]) -> list[str]:
    """The SHA-256 of files, several at a time: the hash runs without the interpreter's lock."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return list(pool.map(digest, names))
