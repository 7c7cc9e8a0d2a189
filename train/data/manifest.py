"""The manifest of a folder of documents: its settings, its held-out documents, and its shards.

``documents.json`` holds the settings, the held-out documents and the sources. Each shard has a JSON file
beside it, which is written after the shard: it marks the shard as finished.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from jetspec_jax.checkpoint.files import write_text
from train.data.holdout import check_heldout

FORMAT, VERSION = "jetspec-documents", 1
MANIFEST = "documents.json"
TRAIN, HELDOUT = "train", "heldout"
REGENERATE, CORPUS = MODES = ("regenerate", "corpus")


@dataclass(frozen=True)
class DocumentsSettings:
    """All settings that the documents of a folder depend on.

    Attributes:
        mode: "regenerate" or "corpus".
        target: The target's hub id, or its folder's name.
        vocab_size: The target's vocabulary size; all token ids are below it.
        dtype: The target's dtype; None if it generated nothing.
        temperatures: All sampling temperatures that occur.
        sampling: The values of the other sampling settings that occur.
        sha256: Hash of all prompts with their sampling settings, or of all documents.
        shard_documents: Most documents per shard.
    """

    mode: str
    target: str
    vocab_size: int
    dtype: str | None
    temperatures: tuple[float, ...]
    sampling: Mapping[str, Any]
    seed: tuple[int, ...]
    source: str
    sha256: str
    count: int
    heldout: int
    shard_documents: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("there are no documents to make: at least one prompt is needed")
        check_heldout(self.count, self.heldout)
        if self.shard_documents < 1:
            raise ValueError(f"a shard needs at least one document, not {self.shard_documents}")

    def plain(self) -> dict[str, Any]:
        """The settings as JSON reads them back."""
        return json.loads(json.dumps(asdict(self)))


class PlannedShard(NamedTuple):
    """A shard of a folder, finished or not: its split, its file's name, and its documents' indices."""

    split: str
    file: str
    indices: list[int]


@dataclass(frozen=True)
class Shard:
    """A finished shard, as the JSON file beside it describes it.

    Attributes:
        split: "train" or "heldout".
        bytes: The size of the shard's file.
        ended: Documents that end with an end-of-sequence token; None if nothing was generated.
        index: For each document its length and the ``[start, stop]`` runs of tokens to learn.
    """

    split: str
    file: str
    bytes: int
    documents: int
    tokens: int
    learn_tokens: int
    ended: int | None
    index: list[tuple[int, list[list[int]]]]

    @classmethod
    def read(cls, folder: Path, planned: PlannedShard) -> "Shard | None":
        """Reads the description of a shard; None if the shard is not finished.

        Raises:
            ValueError: The shard is missing or has another size, or its description is damaged.
        """
        path, described = folder / planned.file, description(folder, planned.file)
        if not described.is_file():
            return None
        try:
            raw = json.loads(described.read_text(encoding="utf-8"))
            shard = cls(**{**raw, "index": [(int(length), spans) for length, spans in raw["index"]]})
            if (shard.split, shard.file) != (planned.split, planned.file):
                raise ValueError(f"it describes {shard.file}")
            if not shard.documents == len(shard.index) == len(planned.indices):
                raise ValueError(f"{len(shard.index)} documents instead of {len(planned.indices)}")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{described} is damaged: {type(error).__name__}: {error}") from error
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            state = "is missing" if size is None else f"is damaged: {size} bytes instead of {shard.bytes}"
            raise ValueError(f"{path} {state}; bring it back, or run what made the folder again")
        return shard

    def write(self, folder: Path) -> None:
        """Writes the description, which marks the shard as finished."""
        write_text(description(folder, self.file), json.dumps(vars(self)) + "\n")


def description(folder: Path, file: str) -> Path:
    """The JSON file that describes a shard."""
    return (folder / file).with_suffix(".json")


@dataclass(frozen=True)
class DocumentsManifest:
    """The content of ``documents.json``, which is written once, before the first shard.

    Attributes:
        settings: The settings of the documents.
        held: Indices of the held-out documents, in order.
        sources: Runs of consecutive documents of one source: its name and the number of documents. Names may
            repeat.
    """

    settings: DocumentsSettings
    held: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        """Checks number, range and order of the held-out documents, and that each document has a source."""
        held, settings = self.held, self.settings
        if len(held) != settings.heldout:
            raise ValueError(f"{len(held)} documents are listed as held out instead of {settings.heldout}")
        if list(held) != sorted({*held}) or (held and not 0 <= held[0] <= held[-1] < settings.count):
            raise ValueError(f"the held-out documents are not indices in 0..{settings.count - 1} in order")
        if wrong := [name for name, count in self.sources if count < 1]:
            raise ValueError(f"the source {wrong[0]!r} has no documents where it is listed")
        if (known := sum(count for _, count in self.sources)) != settings.count:
            raise ValueError(f"the sources have {known} documents instead of {settings.count}")

    @classmethod
    def read(cls, folder: Path) -> "DocumentsManifest":
        """Reads a folder's manifest.

        Raises:
            FileNotFoundError: The folder has no manifest.
            ValueError: The manifest has another version or is damaged.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {MANIFEST}; `python -m train data` makes such a folder")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            found = raw["format"], raw["version"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if found != (FORMAT, VERSION):
            raise ValueError(f"{path} is {found[0]} {found[1]}, and this reads {FORMAT} {VERSION}")
        try:
            settings: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in raw["settings"].items()
            }
            made_with = DocumentsSettings(**settings)
            # Folders of version 0.2 have no sources.
            runs = tuple((str(name), int(n)) for name, n in raw.get("sources", _undivided(made_with)))
            return cls(made_with, tuple(map(int, raw["held"])), runs)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error

    def write(self, folder: Path) -> None:
        """Writes the manifest into a folder."""
        head = {"format": FORMAT, "version": VERSION, "settings": self.settings.plain()}
        more = {"held": self.held, "sources": self.sources}
        write_text(folder / MANIFEST, json.dumps({**head, **more}) + "\n")

    def split(self) -> dict[str, Int[np.ndarray, "n"]]:
        """The indices of the documents of each split."""
        held = np.array(self.held, np.int64)
        return {TRAIN: np.setdiff1d(np.arange(self.settings.count), held), HELDOUT: held}

    def planned(self) -> list[PlannedShard]:
        """All shards of the folder, in order."""
        planned, most = [], self.settings.shard_documents
        for split, indices in self.split().items():
            for number, start in enumerate(range(0, len(indices), most)):
                part = indices[start : start + most].tolist()
                planned.append(PlannedShard(split, f"{split}-{number:05d}.array_record", part))
        return planned

    def refuse_other(self, folder: Path, other: "DocumentsManifest") -> None:
        """Raises ValueError that lists the settings that differ between this manifest and ``other``."""
        theirs, ours = self.settings.plain(), other.settings.plain()
        differing = [f"{n}: {theirs[n]} there, {ours[n]} here" for n in ours if ours[n] != theirs[n]]
        if not differing and self.held != other.held:
            differing = ["other documents are held out"]
        # A folder of an earlier version lists one source, and can be resumed.
        if not differing and self.sources not in (other.sources, _undivided(self.settings)):
            differing = ["its documents come from other sources"]
        if differing:
            listed = "; ".join(differing)
            raise ValueError(f"{folder} was begun with other settings ({listed}); name another folder")


def _undivided(settings: DocumentsSettings) -> tuple[tuple[str, int], ...]:
    """The runs of documents with a single source for all."""
    return ((settings.source, settings.count),)
