"""The corpus: the Python standard library's source of one named version, pinned by a manifest of hashes.

A manifest is made once and kept with the code. Every run checks its folder against the manifest, so the
training text of a model is known exactly, and the held-out modules are always the same.
"""

import hashlib
import json
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from train.data.manifest import HELDOUT, TRAIN

VALIDATION = "validation"
LIBRARY, TESTS = "library", "tests"

VERSION = "3.12.1"
ORIGIN = f"https://www.python.org/ftp/python/{VERSION}/Python-{VERSION}.tar.xz"
LICENCE = "PSF-2.0 (Python Software Foundation License Version 2), https://docs.python.org/3/license.html"

# Files that nobody wrote as source: bundled or generated ones, tables, and inputs of lexer tests.
EXCLUDED = (
    "site-packages/*",
    "*__pycache__*",
    "ensurepip/_bundled/*",
    "config-*",
    "_sysconfigdata*",
    "pydoc_data/*",
    "html/entities.py",
    "stringprep.py",
    "re/_casefix.py",
    "*/data/*",
    "test/tokenizedata/*",
    "test/encoded_modules/*",
    "test/test_tokenize.py",
    "test/test_strtod.py",
    "test/re_tests.py",
)
# Texts that occur in the generated character tables of `encodings`.
TABLE_MARKS = ("decoding_table = (", "decoding_map = ", "aliases = {")

# Well-known modules, held out besides those that the hash picks.
NAMED_HELDOUT = frozenset({"textwrap", "heapq", "calendar", "configparser", "queue", "graphlib"})
HELDOUT_PERCENT, VALIDATION_PERCENT = 3, 2


@dataclass(frozen=True)
class CorpusFile:
    """One file of the corpus.

    Attributes:
        path: Relative to the library's folder, with forward slashes.
        sha256: Hash of the file's bytes.
        size: In bytes.
        split: "train", "validation" (chooses the best weights) or "heldout" (only evaluated).
        kind: "library" or "tests".
    """

    path: str
    sha256: str
    size: int
    split: str
    kind: str


@dataclass(frozen=True)
class CorpusManifest:
    """Which files make up a corpus."""

    name: str
    licence: str
    origin: str
    files: tuple[CorpusFile, ...]

    def write(self, path: Path) -> None:
        """Writes JSON with one line per file, so that two manifests compare well."""
        head = {key: value for key, value in asdict(self).items() if key != "files"}
        rows = ",\n".join(json.dumps([*asdict(source).values()]) for source in self.files)
        path.write_text(json.dumps(head)[:-1] + ',\n"files": [\n' + rows + "\n]}\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "CorpusManifest":
        """Reads what `write` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**raw, "files": tuple(CorpusFile(*row) for row in raw["files"])})


def build_manifest(folder: Path, *, name: str, origin: str = "", licence: str = LICENCE) -> CorpusManifest:
    """Chooses the files of a library's folder and assigns each a split."""
    files, seen = [], set()
    for path, data in _candidates(folder):
        digest = hashlib.sha256(data).hexdigest()
        if digest not in seen:
            seen.add(digest)
            files.append(CorpusFile(path, digest, len(data), split_of(path), kind_of(path)))
    return CorpusManifest(name, licence, origin, tuple(files))


def own_library() -> Path:
    """The running Python's standard library.

    Raises:
        ValueError: Its version is not the corpus's.
    """
    if platform.python_version() != VERSION:
        raise ValueError(
            f"the corpus is the standard library of CPython {VERSION} and this is "
            f"{platform.python_version()}; unpack {ORIGIN} and name its Lib folder with --corpus"
        )
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(folder: Path, manifest: CorpusManifest) -> dict[CorpusFile, str]:
    """Reads the files of a corpus, which must be exactly those of its manifest.

    Raises:
        FileNotFoundError: There is no such folder.
        ValueError: Files are missing or differ; the message names the first ten.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no corpus folder {folder}")
    documents, wrong = {}, []
    for source in manifest.files:
        path = folder / source.path
        data = path.read_bytes() if path.is_file() else None
        if data is None or hashlib.sha256(data).hexdigest() != source.sha256:
            wrong.append(f"{source.path} ({'missing' if data is None else 'differs'})")
        else:
            documents[source] = data.decode("utf-8").replace("\r\n", "\n")
    if wrong:
        more = f" and {len(wrong) - 10} more" if len(wrong) > 10 else ""
        raise ValueError(
            f"{folder} is not the corpus {manifest.name}: {', '.join(wrong[:10])}{more}; it is "
            f"described at {manifest.origin or 'its manifest'}"
        )
    return documents


def split_of(path: str) -> str:
    """A file's split. A module and its tests go to one split, because tests quote what they test."""
    unit = unit_of(path)
    if unit in NAMED_HELDOUT:
        return HELDOUT
    draw = int(hashlib.sha256(f"split:{unit}".encode()).hexdigest(), 16) % 100
    if draw < HELDOUT_PERCENT:
        return HELDOUT
    return VALIDATION if draw < HELDOUT_PERCENT + VALIDATION_PERCENT else TRAIN


def unit_of(path: str) -> str:
    """The module that a file belongs to: ``test/test_heapq.py`` and ``heapq.py`` are both "heapq"."""
    parts = path.removesuffix(".py").split("/")
    if parts[-1] in ("__init__", "__main__") and len(parts) > 1:
        parts.pop()
    return parts[-1].removeprefix("test_").strip("_")


def kind_of(path: str) -> str:
    """Whether a file is library code or tests."""
    folders = path.split("/")[:-1]
    return TESTS if any(f in ("test", "tests", "idle_test") for f in folders) else LIBRARY


def _candidates(folder: Path) -> Iterator[tuple[str, bytes]]:
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        if any(fnmatchcase(path, pattern) for pattern in EXCLUDED):
            continue
        data = file.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue  # deliberately misencoded inputs of the interpreter's own tests
        is_table = path.startswith("encodings/") and any(mark in text for mark in TABLE_MARKS)
        if text.strip() and "\0" not in text and not is_table:
            yield path, data
