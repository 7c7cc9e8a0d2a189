"""Reads prompts and conversations from JSONL files or data sets, and texts from folders.

A row is read from the first of these keys that it has:

* ``messages``: a conversation, a list of objects with ``role`` and ``content``, in all forms that the server
  accepts: content in parts or, beside tool calls, null; arguments of calls as texts; the role "developer".
  ``tools`` holds its tools;
* ``conversations``: a conversation as ShareGPT has it;
* ``text``: a text;
* ``prompt``: the beginning of a text.

Other rows are rows of request logs (see `train.data.traffic`): they have a ``request``, a ``custom_id``, or
the ``object`` of a response. A byte-order mark at the beginning of a file is skipped. Errors give file and
line, and never a row's text.
"""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from jetspec_jax.arguments import skip_bom
from train.data.corpus import read_passages
from train.data.keys import CONVERSATIONS, check_row
from train.data.messages import masked, read_messages
from train.data.traffic import (
    Exchange,
    Pairing,
    answers_of,
    check_body,
    conversation,
    is_log,
    is_response,
    sharegpt,
    template_settings,
)

_log = logging.getLogger("jetspec_jax.train")

MESSAGES, TEXT, PROMPT = KINDS = ("messages", "text", "prompt")
#: The number of dropped rows that the log lists.
MOST_NAMED = 20
# "owner/name", "owner/name:split" or "owner/name/config:split".
DATASET_NAME = re.compile(r"(?P<path>[\w.-]+(/[\w.-]+)?)(/(?P<config>[\w.-]+))?(:(?P<split>[\w.\[\]%:+-]+))?")


@dataclass(frozen=True)
class Entry:
    """A prompt, a text or a conversation.

    Attributes:
        where: File and line, or data set and row, for error messages.
        kind: "messages", "text" or "prompt".
        value: The messages, or the text.
        tools: The tools of a conversation.
        template_arguments: Arguments of the chat template that the conversation sets.
        answer: How a log continued a "prompt".
        cut: Whether the last answer ended by its token limit, and so has no end-of-turn token.
        source: The name of its source; evaluations report tau by source.
    """

    where: str
    kind: str
    value: Any
    tools: Sequence[Mapping[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    answer: str | None = None
    cut: bool = False
    source: str = ""


@dataclass
class Dropped:
    """Counts unusable rows and logs the first of them.

    Attributes:
        reasons: The reason for each row; begins with file and line, or data set and row.
    """

    reasons: list[str] = field(default_factory=list)

    def add(self, error: ValueError) -> None:
        """Adds a row by its error."""
        self.reasons.append(str(error))
        if len(self.reasons) <= MOST_NAMED:
            _log.warning("dropped: %s", error)
        elif len(self.reasons) == MOST_NAMED + 1:
            _log.warning("further dropped rows are counted, not listed")

    def check_rest(self, rest: int) -> None:
        """Raises ValueError if all rows were dropped."""
        if self.reasons and not rest:
            raise ValueError(f"none of {len(self.reasons)} rows can be used; the first: {self.reasons[0]}")


def read_entries(
    source: str | Path,
    limit: int | None = None,
    *,
    dropped: Dropped | None = None,
    ignore_data_keys: Collection[str] | None = None,
) -> list[Entry]:
    """All entries of a JSONL file, a folder of text files or a data set, or the first ``limit``.

    Args:
        source: A file; a folder (see `train.data.corpus`); or a data set as "owner/name", "owner/name:split"
            or "owner/name/config:split", whose split is "train" by default.
        limit: The number of entries to read; None is all.
        dropped: Collects unusable rows; None raises one error for all of them.
        ignore_data_keys: Unknown keys of rows and messages to accept when rows are to be learnt. None reads
            prompts alone: no key is unknown, and no row is excluded.

    Raises:
        FileNotFoundError: There is no such file or data set.
        ValueError: A line is not an entry, or a file no text (the message gives file, line and reason), or
            there are none.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"the limit must be at least 1 entry, not {limit}")
    path, refused = Path(source), list[ValueError]()
    refuse = refused.append if dropped is None else dropped.add
    if path.is_dir():
        found = (Entry(where, TEXT, passage) for where, passage in read_passages(path, refuse))
    else:
        rows = _lines(path) if path.is_file() else _rows(str(source))
        found = _entries(rows, refuse, ignore_data_keys)
    entries = list(islice(found, limit))
    if refused:
        count = f"{len(refused)} rows cannot be used: " if len(refused) > 1 else ""
        raise ValueError(count + "; ".join(map(str, refused)))
    if dropped is not None:
        dropped.check_rest(len(entries))
    if not entries:
        need = "files with text" if path.is_dir() else f"lines, objects with one of {', '.join(KINDS)}"
        raise ValueError(f"{source} holds no entries; it needs {need}")
    return entries


def read_rows(path: Path) -> list[Mapping[str, Any]]:
    """All objects of a JSONL file, with any keys.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A line is not a JSON object (the message gives the line), or there are none.
    """
    rows = [_parsed(where, line) for where, line in _lines(path)]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping):
            raise ValueError(f"{path}:{number}: expected an object, not {masked(row)}")
    if not rows:
        raise ValueError(f"{path} holds no rows; every line must be a JSON object")
    return rows


def load_rows(path: str, config: str | None = None, *, split: str, files: Sequence[str] = ()) -> Any:
    """Loads the rows of a data set with the library ``datasets``.

    Args:
        path: "owner/name" on the Hugging Face hub, or a format such as "json" for ``files``.
        config: The configuration of the data set, if it has several.
        files: The split's files, if ``path`` is a format.

    Raises:
        FileNotFoundError: The rows cannot be loaded.
        ValueError: The library is not installed.
    """
    try:
        import datasets  # pyright: ignore[reportMissingImports] (an extra)
    except ImportError as error:
        raise ValueError('to read a data set: pip install "jetspec-jax[datasets]"') from error
    options = {"data_files": {split: list(files)}} if files else {}
    try:
        return datasets.load_dataset(path, config, split=split, streaming=False, **options)
    except Exception as error:  # the library raises errors of many others
        reason = " ".join(str(error).split())
        raise FileNotFoundError(
            f"the data set {files[0] if files else path} cannot be loaded: {type(error).__name__}: {reason}"
        ) from error


def _lines(path: Path) -> Iterator[tuple[str, bytes]]:
    # Split as bytes: JSON strings may contain characters that end a line of text.
    lines = skip_bom(path.read_bytes()).split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    for number, line in enumerate(lines, start=1):
        yield f"{path}:{number}", line


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


def _entries(
    rows: Iterator[tuple[str, Any]],
    refuse: Callable[[ValueError], None],
    ignored: Collection[str] | None,
) -> Iterator[Entry]:
    """The entries of rows, in the order of their completion; errors are passed to ``refuse``."""
    pairing = Pairing()
    for where, row in rows:
        complete: list[Exchange] = []
        try:
            parsed = _parsed(where, row) if isinstance(row, bytes) else row
            if ignored is not None and isinstance(parsed, Mapping) and not is_response(parsed):
                check_row(where, parsed, ignored)
            if isinstance(parsed, Mapping) and (is_log(parsed) or _may_be_answered(parsed)):
                complete = pairing.add(where, parsed)
            else:
                complete = [*pairing.flush(), Exchange(where, parsed)]
        except ValueError as error:
            # The row may have been a chunk; its stream is then incomplete, and refused.
            yield from _made(pairing.flush(), refuse)
            refuse(error)
        else:
            yield from _made(complete, refuse)
    yield from _made(pairing.rest(), refuse)
    for reason in pairing.orphans():
        refuse(ValueError(reason))


def _made(exchanges: Sequence[Exchange], refuse: Callable[[ValueError], None]) -> Iterator[Entry]:
    for exchange in exchanges:
        try:
            entries = _entries_of(exchange)
        except ValueError as error:
            refuse(error)
        else:
            yield from entries


def _may_be_answered(row: Mapping[str, Any]) -> bool:
    """Whether a row may be a request's body, with its response in the next row."""
    return "messages" in row or ("prompt" in row and TEXT not in row)


def _entries_of(exchange: Exchange) -> list[Entry]:
    """An entry for each answer; one entry if there is no answer."""
    where, body = exchange.where, exchange.body
    if isinstance(body, Mapping):
        check_body(where, body)
    if exchange.response is None:
        return [_entry(where, body)]
    answers = answers_of(where, exchange.response)
    if MESSAGES in body:
        tools, arguments = template_settings(where, body)
        return [
            Entry(where, MESSAGES, conversation(where, body, answer), tools, arguments, cut=answer.cut)
            for answer in answers
        ]
    entry = _entry(where, body)
    if entry.kind != PROMPT:
        raise ValueError(f'{where}: a request has "messages" or "prompt", and this one has neither')
    for answer in answers:
        _check_text(where, "the answer", answer.message.get("content"))
    return [replace(entry, answer=answer.message["content"], cut=answer.cut) for answer in answers]


def _parsed(where: str, line: bytes) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8: {error.reason} at its byte {error.start}") from error
    if not text.strip():
        raise ValueError(f"{where}: an empty line; every line must be a JSON object")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON ({error}); every line must be a JSON object") from error


def _entry(where: str, value: Any) -> Entry:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, not {masked(value)}")
    kind = next((kind for kind in (MESSAGES, CONVERSATIONS, TEXT, PROMPT) if kind in value), None)
    if kind is None:
        raise ValueError(f"{where}: expected one of the keys {', '.join(KINDS)}, there are {sorted(value)}")
    if kind in (MESSAGES, CONVERSATIONS):
        messages = value[kind] if kind == MESSAGES else sharegpt(where, value)
        return Entry(where, MESSAGES, read_messages(where, messages), *template_settings(where, value))
    _check_text(where, f'"{kind}"', value[kind])
    if not value[kind]:
        raise ValueError(f'{where}: "{kind}" is empty; it needs at least one character')
    return Entry(where, kind, value[kind])


def _check_text(where: str, name: str, text: Any) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{where}: {name} must be a string, not {masked(text)}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {name} holds half a surrogate pair, which is no character") from error
