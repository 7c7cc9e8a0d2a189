"""Checksums of a checkpoint's files, in the format of ``sha256sum``.

The names begin with the checkpoint's folder, so that a renamed folder is detected:
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
# Orbax's record of the time of writing, which it changes later; restoring does not need it.
_NOTE = "_CHECKPOINT_METADATA"

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<folder>[^/\n]+)/(?P<name>[^\n]+)")


class ChecksumError(ValueError):
    """A checkpoint's files differ from its checksums."""


def write_checksums(folder: Path, name: str) -> None:
    """Writes the checksums of the files of a folder, except Orbax's record of the time of writing.

    ``name`` is the folder's final name; it may still have a temporary one.
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
    """The original name of a checkpoint's folder.

    Raises:
        ChecksumError: The checksums are damaged.
        OSError: The checksums cannot be read.
    """
    return _read(folder)[0]


def check_checksums(folder: Path, *, part: int = 0, parts: int = 1) -> None:
    """Verifies the files of a checkpoint; several processes verify a part each, the first is 0.

    Raises:
        ChecksumError: A file differs or is missing, or the checksums themselves are damaged.
        OSError: A file cannot be read.
    """
    expected = _read(folder)[1]
    names = sorted(expected)[part::parts]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise ChecksumError(f"{missing[0]} is missing")
    found = zip(names, _digests(folder, names), strict=True)
    if changed := [name for name, digest in found if digest != expected[name]]:
        more = f", as do {len(changed) - 1} other files" if len(changed) > 1 else ""
        raise ChecksumError(f"{changed[0]} differs from its checksum{more}")


def _read(folder: Path) -> tuple[str, dict[str, str]]:
    """The folder's original name, and its files' digests by name."""
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
    """The SHA-256 of files, in threads: hashing releases the GIL."""

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor() as pool:
        return list(pool.map(digest, names))
