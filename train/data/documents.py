"""Folders of documents in shards, which are written atomically.

A folder holds ``documents.json`` (see `train.data.manifest`) and ArrayRecord files such as
``train-00000.array_record``, whose records `train.data.records` describes. Each has a ``train-00000.json``
with the lengths of its documents and their tokens to learn, so shards are read only when a document is.
"""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import grain
import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue] (compiled)

from jetspec_jax.checkpoint.files import replacing
from train.data.manifest import (
    MANIFEST,
    TRAIN,
    DocumentsManifest,
    DocumentsSettings,
    PlannedShard,
    Shard,
    description,
)
from train.data.records import Document, decode, encode, learn_spans

# One record per chunk suits random access; the compression is the library's default.
WRITER_OPTIONS = "group_size:1,zstd:3"
READER_OPTIONS = {"max_parallelism": "0"}


class Writer:
    """Writes a folder of documents.

    Attributes:
        planned: All shards, finished or not.
    """

    def __init__(
        self,
        folder: Path,
        settings: DocumentsSettings,
        held: Sequence[int],
        sources: Sequence[str] | None = None,
    ):
        """Begins a folder, or resumes a folder with the same settings.

        Lost or damaged shards are made again, and a line is printed.

        Args:
            held: Indices of the held-out documents, in order.
            sources: The name of each document's source; None is the settings' source for all.

        Raises:
            ValueError: The folder was begun with other settings, which are listed; its manifest is missing or
                damaged; or ``held`` or ``sources`` do not fit the settings.
        """
        names = [settings.source] * settings.count if sources is None else sources
        runs = tuple((name, len([*documents])) for name, documents in groupby(names))
        manifest = DocumentsManifest(settings, tuple(held), runs)
        self.folder, self.settings, self.planned = folder, settings, manifest.planned()
        self._done: dict[str, Shard] = {}
        if (folder / MANIFEST).exists():
            DocumentsManifest.read(folder).refuse_other(folder, manifest)
            self._take_up()
        elif any(folder.glob("*.array_record")):
            raise ValueError(f"{folder} has shards and no {MANIFEST}; name another folder, or bring it back")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            manifest.write(folder)

    def _take_up(self) -> None:
        lost = []
        for planned in self.planned:
            try:
                shard = Shard.read(self.folder, planned)
            except ValueError:
                # Otherwise the old description would be read as that of the new shard.
                description(self.folder, planned.file).unlink()
                lost.append(planned.file)
            else:
                if shard is not None:
                    self._done[planned.file] = shard
        if lost:
            more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
            listed = ", ".join(lost[:3]) + more
            print(f"{self.folder}: missing or damaged, to be written again: {listed}", flush=True)

    @property
    def missing(self) -> list[PlannedShard]:
        """Shards that are not finished."""
        return [planned for planned in self.planned if planned.file not in self._done]

    @property
    def progress(self) -> str:
        """A message about how many shards are written."""
        return f"{self.folder}: {len(self._done)} of {len(self.planned)} shards are written"

    def write(self, planned: PlannedShard, documents: Sequence[Document], ended: int | None) -> None:
        """Writes a shard atomically, and then its description.

        Args:
            ended: How many of them end with an end-of-sequence token; None if nothing was generated.

        Raises:
            ValueError: A token id is outside the target's vocabulary.
            OSError: The file cannot be written.
        """
        path = self.folder / planned.file
        for index, document in zip(planned.indices, documents, strict=True):
            _check_ids(document, self.settings.vocab_size, f"{path}: document {index}")
        try:
            with replacing(path) as partial:
                writer = array_record_module.ArrayRecordWriter(str(partial), WRITER_OPTIONS)
                for document in documents:
                    writer.write(encode(document))
                writer.close()
        except RuntimeError as error:  # the library raises this for a full disk
            raise OSError(f"{path} cannot be written: {error}") from error
        index = [(len(document.tokens), learn_spans(document.learn)) for document in documents]
        shard = Shard(
            planned.split,
            planned.file,
            path.stat().st_size,
            len(documents),
            sum(len(document.tokens) for document in documents),
            sum(int(document.learn.sum()) for document in documents),
            ended,
            index,
        )
        shard.write(self.folder)
        self._done[planned.file] = shard


class Documents:
    """The documents of one split of a finished folder, by index. Thread-safe.

    Attributes:
        numbers: Index of each document among all documents of the folder.
        sources: The name of each document's source.
        lengths: Tokens of each document.
        spans: The runs of tokens to learn, each as document, start, stop.
    """

    def __init__(self, folder: Path, manifest: DocumentsManifest, shards: Sequence[Shard], split: str):
        """Private: `open` reads the manifest and the shards' descriptions."""
        self.folder, self.settings, self.split = folder, manifest.settings, split
        shards = [shard for shard in shards if shard.split == split]
        self.numbers = manifest.split()[split]
        names = [name for name, count in manifest.sources for _ in range(count)]
        self.sources = [names[number] for number in self.numbers]
        self._index = [document for shard in shards for document in shard.index]
        self._paths = [folder / shard.file for shard in shards for _ in range(shard.documents)]
        parts = [f"{folder / shard.file}[0:{shard.documents}]" for shard in shards]
        self._records = grain.sources.ArrayRecordDataSource(parts, READER_OPTIONS) if parts else ()
        self.lengths = np.array([length for length, _ in self._index], np.int64)
        spans = [(i, *span) for i, (_, runs) in enumerate(self._index) for span in runs]
        self.spans = np.array(spans, np.int64).reshape(-1, 3)

    @classmethod
    def open(cls, folder: Path, split: str = TRAIN) -> "Documents":
        """The documents of a split; no shard is read yet.

        Raises:
            FileNotFoundError: The folder holds no documents.
            ValueError: It is unfinished or damaged.
        """
        manifest = DocumentsManifest.read(folder)
        shards = [Shard.read(folder, planned) for planned in manifest.planned()]
        finished = [shard for shard in shards if shard is not None]
        if missing := len(shards) - len(finished):
            raise ValueError(
                f"{folder} is not finished: {missing} shards are missing; run what made it again"
            )
        return cls(folder, manifest, finished, split)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Document:
        """A document by its index.

        Raises:
            ValueError: Its shard is damaged.
        """
        path = self._paths[index]
        try:
            document = decode(self._records[index])
            length, spans = self._index[index]
            if len(document.tokens) != length:
                raise ValueError(f"{len(document.tokens)} tokens instead of {length}")
            # The records have checksums; the description of a shard has none.
            if learn_spans(document.learn) != spans:
                raise ValueError(f"its tokens to learn are not those of {path.with_suffix('.json').name}")
        except (RuntimeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        _check_ids(document, self.settings.vocab_size, str(path))
        return document

    def __iter__(self) -> Iterator[Document]:
        return (self[index] for index in range(len(self)))


def _check_ids(document: Document, vocab_size: int, where: str) -> None:
    tokens = document.tokens
    if not len(tokens):
        raise ValueError(f"{where} has no tokens")
    outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
    if outside.size:
        raise ValueError(f"{where} has token id {outside[0]}, outside the vocabulary 0..{vocab_size - 1}")
