"""Reads prompts and conversations from JSONL files or data sets.

An entry is read from the first of these keys that it has:

* ``messages``: a conversation, a list of objects with ``role`` and ``content``;
* ``text``: a text;
* ``prompt``: the beginning of a text.

Further keys are ignored.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

MESSAGES, TEXT, PROMPT = KINDS = ("messages", "text", "prompt")
ROLES = ("system", "user", "assistant", "tool")
# "owner/name", "owner/name:split" or "owner/name/config:split".
DATASET_NAME = re.compile(r"(?P<path>[\w.-]+(/[\w.-]+)?)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.\[\]%:+-]+))?")


@dataclass(frozen=True)
class Entry:
    """A prompt, a text or a conversation.

    Attributes:
        where: File and line, or data set and row, for error messages.
        kind: "messages", "text" or "prompt".
        value: The messages, or the text.
    """

    where: str
    kind: str
    value: Any


def read_entries(source: str | Path, limit: int | None = None) -> list[Entry]:
    """All entries of a JSONL file or of a data set, or the first ``limit``.

    Args:
        source: A file, or a data set as "owner/name", "owner/name:split" or "owner/name/config:split"; the
            split is "train" unless another is named.
        limit: How many entries to read; None is all.

    Raises:
        FileNotFoundError: There is no such file or data set.
        ValueError: A line is not an entry, which the message explains with file and line, or there are none.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the limit must be at least 1 entry, not {limit}")
    rows = _lines(Path(source)) if Path(source).is_file() else _rows(str(source))
    entries = [_entry(where, value) for where, value in islice(rows, limit)]
    if not entries:
        raise ValueError(f"{source} holds no entries; a line is an object with one of {', '.join(KINDS)}")
    return entries


def load_rows(path: str, config: str | None = None, *, split: str, files: Sequence[str] = ()) -> Any:
    """Loads the rows of a data set with the library ``datasets``.

    Args:
        path: "owner/name" on the Hugging Face hub, or a format such as "json" for ``files``.
        config: The configuration of the data set, where it has several.
        split: The part of it.
        files: The split's files, where ``path`` is a format.

    Raises:
        FileNotFoundError: They cannot be loaded.
        ValueError: The library is not installed.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise ValueError('to read a data set: pip install "jetspec-jax[datasets]"') from error
    named = {"data_files": {split: list(files)}} if files else {}
    try:
        return datasets.load_dataset(path, config, split=split, streaming=False, **named)
    except Exception as error:  # the library raises errors of many others
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"the data set {files[0] if files else path} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    # Split as bytes: JSON strings may hold characters that end a line of text.
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: not UTF-8: {error.reason} at its byte {error.start}") from error
        if not text.strip():
            raise ValueError(f"{where}: an empty line; every line must be a JSON object")
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{where}: not JSON ({error}); every line must be a JSON object") from error
        yield where, value


def _rows(name: str) -> Iterator[tuple[str, Any]]:
    match = DATASET_NAME.fullmatch(name)
    if match is None or name.endswith((".json", ".jsonl")):
        raise FileNotFoundError(f"no file {name}; and a data set is named owner/name[/config][:split]")
    try:
        rows = load_rows(match["path"], match["config"], split=match["split"] or "train")
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"there is no file {name}; {error}") from error
    for number, row in enumerate(rows):
        yield f"{name} row {number}", row


def _entry(where: str, value: Any) -> Entry:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, not {_shown(value)}")
    kind = next((kind for kind in KINDS if kind in value), None)
    if kind is None:
        raise ValueError(f"{where}: expected one of the keys {', '.join(KINDS)}, there are {sorted(value)}")
    if kind == MESSAGES:
        return Entry(where, kind, _messages(where, value[kind]))
    _check_text(where, f'"{kind}"', value[kind])
    if not value[kind]:
        raise ValueError(f'{where}: "{kind}" is empty; it needs at least one character')
    return Entry(where, kind, value[kind])


def _messages(where: str, messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(f'{where}: "messages" must be a list that is not empty, not {_shown(messages)}')
    for number, message in enumerate(messages):
        name = f"message {number}"
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise ValueError(f'{where}: {name} must have "role" and "content": {_shown(message)}')
        if message["role"] not in ROLES:
            raise ValueError(
                f"{where}: {name} has the role {_shown(message['role'])}, not one of {', '.join(ROLES)}"
            )
        _check_text(where, f"the content of {name}", message["content"])
    return [dict(message) for message in messages]


def _check_text(where: str, name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{where}: {name} must be a string, not {_shown(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {name} holds half a surrogate pair, which is no character") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
