"""Reads the header of a GGUF file: its metadata and the tensors' offsets.

The reader of the package ``gguf`` makes several arrays per token of the vocabulary and trusts all lengths.
Files are untrusted, so this reader checks every length against the file's size and a limit, before it reads.
"""

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np

from jetspec_jax.arguments import shown
from jetspec_jax.checkpoint.content import CheckpointError, check_regular, content_of
from jetspec_jax.config.fields import MAX_SIZE, is_int

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4
MAX_NAME = 64  # of tensors, in characters: the format's own limit

#: Bytes of the metadata without `VOCABULARY`, and bytes of all tensors' names, shapes and offsets.
MAX_HEADER_BYTES = 2**22
#: Metadata keys, and elements of an array, but for those of `VOCABULARY`, which may have `MAX_SIZE`.
MAX_ELEMENTS = 2**12
MAX_TENSORS = 2**14
#: Arrays with an element for each token or merge. Published ones have up to 514,906 elements and 9 MB.
VOCABULARY = frozenset(
    f"tokenizer.ggml.{name}" for name in ("tokens", "token_type", "scores", "merges", "precompiled_charsmap")
)
MAX_VOCABULARY_BYTES = 2**24  # of each of these arrays

# A copy of ``tokenizer.json``, which is skipped.
_TOKENIZER_JSON = "tokenizer.huggingface.json"
# The most wrong offsets that an error lists.
_LISTED = 8

Kind = gguf.GGMLQuantizationType
_Value = gguf.GGUFValueType

# The `struct` format of each scalar type of metadata; all are little-endian.
_SCALARS = {
    _Value.UINT8: "B",
    _Value.INT8: "b",
    _Value.UINT16: "H",
    _Value.INT16: "h",
    _Value.UINT32: "I",
    _Value.INT32: "i",
    _Value.FLOAT32: "f",
    _Value.BOOL: "?",
    _Value.UINT64: "Q",
    _Value.INT64: "q",
    _Value.FLOAT64: "d",
}
_LENGTH = struct.Struct("<Q")


class TensorInfo(NamedTuple):
    """A tensor of a file, unread.

    The shape is in NumPy's order, the fastest axis last; ``start`` is in the file.
    """

    shape: tuple[int, ...]
    kind: Kind
    start: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class Header:
    """The header of a file.

    Attributes:
        path: The file.
        metadata: Values by key: numbers, booleans, strings, and lists of them. Numbers of `VOCABULARY` are
            NumPy arrays.
        tensors: The tensors by name.
        content: All bytes of the file, mapped into memory.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    content: np.ndarray


def is_gguf(place: str | Path) -> bool:
    """Whether a path has the suffix of a GGUF file and is not a folder; the file need not exist."""
    return os.fspath(place).lower().endswith(SUFFIX) and not os.path.isdir(place)


def read_header(path: Path) -> Header:
    """Reads the header of a file, but no tensors.

    Raises:
        CheckpointError: The file is not GGUF, has an unsupported version or byte order, is truncated, has a
            header beyond the limits, has a tensor of unknown type, misaligned or overlapping, or is one of
            several files of a model.
        FileNotFoundError: The file does not exist.
    """
    check_regular(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: there is no such file")
    if not path.stat().st_size:
        raise CheckpointError(f"{path} is empty")
    content = np.asarray(np.memmap(path, np.uint8, mode="r"))
    with content_of(path, struct.error):
        return _read(path, content)


def _read(path: Path, content: np.ndarray) -> Header:
    cursor = _Cursor(content)
    if (magic := bytes(cursor.next_bytes(4))) != MAGIC:
        raise ValueError(f"it is no GGUF file: it begins with {magic!r} and not with {MAGIC!r}")
    version = cursor.scalar("I")
    if version and not version & 0xFFFF:
        raise ValueError("it is a big-endian GGUF file; only little-endian ones are supported")
    if version not in VERSIONS:
        supported = ", ".join(map(str, VERSIONS))
        raise ValueError(f"it is GGUF of version {version}; supported: {supported}")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    if num_tensors > MAX_TENSORS or num_values > MAX_ELEMENTS:
        raise ValueError(
            f"it has {num_tensors:,} tensors and {num_values:,} metadata keys, and may have {MAX_TENSORS:,} "
            f"and {MAX_ELEMENTS:,}"
        )
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.name()
        if key in metadata:
            raise ValueError(f"metadata key {shown(key)} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"), key)
    parts = metadata.get("split.count", 0)
    if not is_int(parts):
        raise ValueError(f"split.count must be an integer, not {shown(parts)}")
    if parts > 1:  # joined files keep the key, as 0
        raise ValueError(
            f"it is one of {parts} files that make up a model; join them with llama-gguf-split --merge"
        )
    places: dict[str, tuple[tuple[int, ...], Kind, int]] = {}
    cursor.left = MAX_HEADER_BYTES
    for _ in range(num_tensors):
        name = cursor.name()
        if len(name) > MAX_NAME:
            raise ValueError(f"tensor {shown(name)} has a name of {len(name):,} characters, above {MAX_NAME}")
        if name in places:
            raise ValueError(f"tensor {name!r} is there twice")
        places[name] = cursor.tensor(name)
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not is_int(alignment) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two, not {shown(alignment)}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _info(name, *place, start=start, size=len(content)) for name, place in places.items()}
    _check_starts(tensors, alignment)
    return Header(path, metadata, tensors, content)


def _info(name: str, shape: tuple[int, ...], kind: Kind, offset: int, *, start: int, size: int) -> TensorInfo:
    """The position of a tensor in a file of ``size`` bytes whose tensors begin at ``start``."""
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"{name}: rows of {shape[-1]} values are no whole blocks of {block} ({kind.name})")
    nbytes = math.prod(shape) // block * block_bytes
    if (stop := start + offset + nbytes) > size:
        raise ValueError(f"it is cut off: {name} ends at byte {stop}, and the file has {size}")
    return TensorInfo(shape, kind, start + offset, nbytes)


def _check_starts(tensors: Mapping[str, TensorInfo], alignment: int) -> None:
    """Refuses misaligned and overlapping tensors; the error lists them in the order of their bytes."""
    wrong, last, last_stop = [], "", 0
    for name, info in sorted(tensors.items(), key=lambda item: item[1].start):
        if info.start % alignment:
            wrong.append(f"{name} begins at byte {info.start}, which is no multiple of {alignment}")
        if info.start < last_stop:
            wrong.append(f"{name} begins at byte {info.start}, before {last} ends at byte {last_stop}")
        last, last_stop = max((last, last_stop), (name, info.start + info.nbytes), key=lambda end: end[1])
    if wrong:
        more = [f"and {len(wrong) - _LISTED} more"] if len(wrong) > _LISTED else []
        raise ValueError("tensors are misaligned or overlap:\n  " + "\n  ".join([*wrong[:_LISTED], *more]))


class _Cursor:
    """Reads a header sequentially; raises ValueError before it reads beyond the file or the limit.

    `left` is the number of bytes that may still be read.
    """

    def __init__(self, content: np.ndarray):
        self._content, self._name = content.data, ""
        self.at, self.left = 0, MAX_HEADER_BYTES

    def scalar(self, form: str) -> Any:
        """A number of a `struct` format."""
        return struct.unpack(f"<{form}", self.next_bytes(struct.calcsize(form)))[0]

    def string(self) -> str:
        """A string: the number of bytes, then the bytes in UTF-8."""
        return str(self.next_bytes(*_LENGTH.unpack(self.next_bytes(8))), "utf-8")

    def name(self) -> str:
        """A metadata key or a tensor's name, which errors mention."""
        self._name = self.string()
        return self._name

    def value(self, code: int, key: str) -> Any:
        """A metadata value of the type with this code."""
        kind = self._kind(code, key)
        if kind is _Value.STRING and key == _TOKENIZER_JSON:
            size = self.scalar("Q")
            self.left += size
            self.next_bytes(size)
            return None
        if kind is _Value.STRING:
            return self.string()
        if kind is not _Value.ARRAY:
            return _plain(kind, self.scalar(_SCALARS[kind]))
        kind, count = self._kind(self.scalar("I"), key), self.scalar("Q")
        if kind is _Value.ARRAY:
            raise ValueError(f"{shown(key)} is an array of arrays, which is not supported")
        most = MAX_SIZE if key in VOCABULARY else MAX_ELEMENTS
        if count > most:
            raise ValueError(f"metadata key {shown(key)} has {count:,} elements, and may have {most:,}")
        if key not in VOCABULARY:
            values = self._array(kind, count)
            return values.tolist() if isinstance(values, np.ndarray) else values
        left, self.left = self.left, MAX_VOCABULARY_BYTES
        values = self._array(kind, count)
        self.left = left
        return values

    def tensor(self, name: str) -> tuple[tuple[int, ...], Kind, int]:
        """A tensor's shape, kind, and offset from the first tensor's bytes."""
        num_axes = self.scalar("I")
        if not 1 <= num_axes <= MAX_AXES:
            raise ValueError(f"tensor {name!r} has {num_axes} axes; it must have 1 to {MAX_AXES}")
        shape = tuple(self.scalar("Q") for _ in range(num_axes))[::-1]
        if 0 in shape:
            raise ValueError(f"tensor {name!r} has an empty axis: {list(shape)}")
        code, offset = self.scalar("I"), self.scalar("Q")
        try:
            return shape, Kind(code), offset
        except ValueError:
            raise ValueError(f"tensor {name!r} is of an unknown type, number {code}") from None

    def _kind(self, code: int, key: str) -> _Value:
        try:
            return _Value(code)
        except ValueError:
            raise ValueError(f"metadata key {shown(key)} is of an unknown type, number {code}") from None

    def _array(self, kind: _Value, count: int) -> list[str] | np.ndarray:
        """Strings, or a view of numbers."""
        if kind is _Value.STRING:
            return self._strings(count)
        form = f"<{_SCALARS[kind]}"
        return np.frombuffer(self.next_bytes(count * struct.calcsize(form)), form)

    def _strings(self, count: int) -> list[str]:
        """Strings as in `string`, without a call for each: a tokenizer has up to a million."""
        content, at, found = self._content, self.at, []
        most = min(len(content), at + self.left)
        for _ in range(count):
            start = at = at + _LENGTH.size
            if start <= most:
                at += _LENGTH.unpack_from(content, start - _LENGTH.size)[0]
            if at > most:
                break
            found.append(str(content[start:at], "utf-8"))
        self.next_bytes(at - self.at)  # raises an error after a break
        return found

    def next_bytes(self, count: int) -> memoryview:
        """The next bytes, in place."""
        start = self.at
        self.at += count
        self.left -= count
        if self.at > len(self._content):
            raise ValueError(
                f"it is cut off: its header goes on to byte {self.at} at least, and the file has "
                f"{len(self._content)}"
            )
        if self.left < 0:
            raise ValueError(
                f"its header is too large: {count:,} bytes follow after {shown(self._name)}, and only "
                f"{self.left + count:,} more may; metadata and the list of tensors may have "
                f"{MAX_HEADER_BYTES:,} bytes each, and each array of a vocabulary {MAX_VOCABULARY_BYTES:,}"
            )
        return self._content[start : self.at]


def _plain(kind: _Value, value: Any) -> Any:
    """A scalar; a float32 becomes its shortest decimal number, such as 1e-5, as in a ``config.json``."""
    return float(str(np.float32(value))) if kind is _Value.FLOAT32 else value
