"""The manifest of a folder of documents: what it was made with, and what its finished shards hold."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

FORMAT, VERSION = "jetspec-documents", 1
MANIFEST = "documents.json"
TRAIN, HELDOUT = "train", "heldout"
REGENERATE, CORPUS = MODES = ("regenerate", "corpus")
MOST_HELDOUT = 64


@dataclass(frozen=True)
class Settings:
    """What a folder is made with: all that its documents depend on.

    Attributes:
        mode: "regenerate" or "corpus".
        target: The target's name; its folder's name where it is local.
        vocab_size: The target's; all token ids are below it.
        dtype: What the target computed in; None where it computed nothing.
        temperatures: Those that occur.
        sampling: The other sampling settings: the values that occur.
        seed: Of the sampling.
        source: Where the prompts come from.
        sha256: Of all prompts with their parameters, or of all documents.
        count: How many documents.
        heldout: How many of them are not for training.
        shard_documents: Most documents of a shard.
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
        """Checks the counts."""
        if self.count < 1:
            raise ValueError("there are no documents to make: at least one prompt is needed")
        if not 0 <= self.heldout < self.count:
            raise ValueError(
                f"{self.heldout} of {self.count} documents cannot be held out: 0..{self.count - 1} can"
            )
        if self.shard_documents < 1:
            raise ValueError(f"a shard needs at least one document, not {self.shard_documents}")

    def plain(self) -> dict[str, Any]:
        """The settings as JSON has them."""
        return json.loads(json.dumps(asdict(self)))


def default_heldout(count: int) -> int:
    """Documents held out unless somebody says otherwise: an eighth, at least 1 of 2, at most 64."""
    return min(MOST_HELDOUT, max(count // 8, 1)) if count >= 2 else 0


def split_indices(count: int, heldout: int) -> dict[str, Int[np.ndarray, "n"]]:
    """Which documents belong to which split; those held out are evenly spaced.

    For 6 documents, 2 held out: ``t h t t h t``.
    """
    held = (2 * np.arange(heldout) + 1) * count // (2 * max(heldout, 1))
    return {TRAIN: np.setdiff1d(np.arange(count), held), HELDOUT: held}


@dataclass(frozen=True)
class Shard:
    """A finished file of documents.

    Attributes:
        split: "train" or "heldout".
        file: Its name.
        bytes: Its size.
        documents: How many it holds.
        tokens: Of all of them.
        learn_tokens: Those of them that are to be learnt.
        ended: Documents that end with an end-of-sequence token; None where nothing was generated.
        index: For each document its length and the ``[start, stop]`` runs of tokens to be learnt.
    """

    split: str
    file: str
    bytes: int
    documents: int
    tokens: int
    learn_tokens: int
    ended: int | None
    index: list[tuple[int, list[list[int]]]]


@dataclass(frozen=True)
class Manifest:
    """What ``documents.json`` says."""

    settings: Settings
    shards: tuple[Shard, ...]

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Reads a folder's manifest and looks whether its shards are there, without reading them.

        Raises:
            FileNotFoundError: The folder has none.
            ValueError: It is of another version or damaged, or a shard is missing or damaged.
        """
        path = folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no {MANIFEST}; `python -m train data` makes such a folder")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            found = raw["format"], raw["version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if found != (FORMAT, VERSION):
            raise ValueError(f"{path} is {found[0]} {found[1]}, and this reads {FORMAT} {VERSION}")
        try:
            settings: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list) else value
                for name, value in raw["settings"].items()
            }
            shards = [
                Shard(**{**shard, "index": [(int(length), spans) for length, spans in shard["index"]]})
                for shard in raw["shards"]
            ]
            manifest = cls(Settings(**settings), tuple(shards))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        manifest.check_files(folder)
        return manifest

    def check_files(self, folder: Path) -> None:
        """Raises ValueError naming the first shard that is missing or not as long as it was."""
        for shard in self.shards:
            path = folder / shard.file
            size = path.stat().st_size if path.is_file() else None
            if size != shard.bytes:
                state = "is missing" if size is None else f"is damaged: {size} bytes instead of {shard.bytes}"
                raise ValueError(f"{path} {state}; bring it back, or make the whole folder again")

    def text(self) -> str:
        """As JSON with one line per shard."""
        rows = ",\n".join(json.dumps(vars(shard)) for shard in self.shards)
        head = json.dumps({"format": FORMAT, "version": VERSION, "settings": self.settings.plain()})
        return head[:-1] + ',\n"shards": [\n' + rows + "\n]}\n"


class ShardPlan(NamedTuple):
    """A shard that is to be: its split, its file's name, and the documents' indices."""

    split: str
    file: str
    indices: list[int]


def plan_shards(settings: Settings) -> list[ShardPlan]:
    """All shards of a folder, in order."""
    plans = []
    for split, indices in split_indices(settings.count, settings.heldout).items():
        for number, start in enumerate(range(0, len(indices), settings.shard_documents)):
            part = indices[start : start + settings.shard_documents].tolist()
            plans.append(ShardPlan(split, f"{split}-{number:05d}.array_record", part))
    return plans


def refuse_other(folder: Path, settings: Settings, mine: Settings) -> None:
    """Raises ValueError listing the settings in which a folder differs from mine."""
    theirs, ours = settings.plain(), mine.plain()
    names = [name for name in ours if ours[name] != theirs[name]]
    if names:
        listed = "; ".join(f"{name}: {theirs[name]} there, {ours[name]} here" for name in names)
        raise ValueError(f"{folder} was begun with other settings ({listed}); name another folder")
