"""Reads a folder of text files, such as source code, as passages that begin and end at lines."""

from collections.abc import Callable, Iterator
from pathlib import Path

from jetspec_jax.arguments import skip_bom

#: Most characters of a passage; a longer line is a passage.
PASSAGE = 1000


def read_passages(folder: Path, refuse: Callable[[ValueError], object]) -> Iterator[tuple[str, str]]:
    """The passages of all files in the order of their paths, each after its file and line.

    Hidden files and folders, and passages of white space, are left out. Lines end with a line feed.

    Args:
        folder: The folder; its folders are read too.
        refuse: Gets the error of each file that is not UTF-8 text.
    """
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        try:
            text = skip_bom(path.read_bytes()).decode()
        except UnicodeDecodeError as error:
            refuse(ValueError(f"{path}: not UTF-8: {error.reason} at its byte {error.start}"))
            continue
        if "\0" in text:
            refuse(ValueError(f"{path}: not a text: it has a zero byte"))
            continue
        for line, passage in _cut(text.replace("\r\n", "\n")):
            if passage.strip():
                yield f"{path}:{line}", passage


def _cut(text: str) -> Iterator[tuple[int, str]]:
    """Passages of whole lines, each after the number of its first line."""
    first, lines, size = 1, [], 0
    for line in text.split("\n"):
        if lines and size + len(line) + 1 > PASSAGE:
            yield first, "\n".join(lines) + "\n"
            first, lines, size = first + len(lines), [], 0
        lines.append(line)
        size += len(line) + 1
    yield first, "\n".join(lines)
