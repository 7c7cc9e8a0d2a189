"""Reads the header of a GGUF file: its metadata and the tensors' offsets.

The reader of the package ``gguf`` makes several arrays per token of the vocabulary and trusts all lengths.
Files are untrusted, so this reader checks every length against the file's size.
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

from jetspec_jax.checkpoint.content import CheckpointError, check_regular, content_of

SUFFIX = ".gguf"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_AXES = 4

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


class TensorInfo(NamedTuple):
    """A tensor of a file, unread.

    Attributes:
        shape: The shape in NumPy's order, the fastest axis last.
        kind: The storage type of its values.
        start: Offset of its bytes in the file.
        nbytes: Number of its bytes.
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
        metadata: Values by key: numbers, booleans, strings, and lists of them.
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
            tensor of unknown type, or is one of several files of a model.
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
    if (magic := cursor.read_bytes(4)) != MAGIC:
        raise ValueError(f"it is no GGUF file: it begins with {magic!r} and not with {MAGIC!r}")
    version = cursor.scalar("I")
    if version and not version & 0xFFFF:
        raise ValueError("it is a big-endian GGUF file; only little-endian ones are supported")
    if version not in VERSIONS:
        supported = ", ".join(map(str, VERSIONS))
        raise ValueError(f"it is GGUF of version {version}; supported: {supported}")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_values):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"metadata key {key!r} is there twice")
        metadata[key] = cursor.value(cursor.scalar("I"), key)
    if (parts := metadata.get("split.count", 1)) != 1:
        raise ValueError(
            f"it is one of {parts} files that make up a model; join them with llama-gguf-split --merge"
        )
    places: dict[str, tuple[tuple[int, ...], Kind, int]] = {}
    for _ in range(num_tensors):
        name = cursor.string()
        if name in places:
            raise ValueError(f"tensor {name!r} is there twice")
        places[name] = cursor.tensor(name)
    alignment = metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment must be a power of two, not {alignment!r}")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _info(name, *place, start=start, size=len(content)) for name, place in places.items()}
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


class _Cursor:
    """Reads a header sequentially; raises ValueError if the file is truncated."""

    def __init__(self, content: np.ndarray):
        self._content, self.at = content.data, 0

    def read_bytes(self, count: int) -> bytes:
        """The next bytes."""
        self._check(count)
        self.at += count
        return bytes(self._content[self.at - count : self.at])

    def scalar(self, form: str) -> Any:
        """A number of a `struct` format."""
        return struct.unpack(f"<{form}", self.read_bytes(struct.calcsize(form)))[0]

    def string(self) -> str:
        """A string: the number of bytes, then the bytes in UTF-8."""
        return self.read_bytes(self.scalar("Q")).decode()

    def value(self, code: int, key: str) -> Any:
        """A metadata value of the type with this code."""
        kind = self._kind(code, key)
        if kind is _Value.STRING:
            return self.string()
        if kind is not _Value.ARRAY:
            return _plain(kind, self.scalar(_SCALARS[kind]))
        kind, count = self._kind(self.scalar("I"), key), self.scalar("Q")
        if kind is _Value.ARRAY:
            raise ValueError(f"{key} is an array of arrays, which is not supported")
        if kind is _Value.STRING:
            self._check(8 * count)
            return [self.string() for _ in range(count)]
        values = np.frombuffer(self.read_bytes(count * struct.calcsize(_SCALARS[kind])), f"<{_SCALARS[kind]}")
        return values.tolist()

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
            raise ValueError(f"metadata key {key!r} is of an unknown type, number {code}") from None

    def _check(self, count: int) -> None:
        if self.at + count > len(self._content):
            raise ValueError(
                f"it is cut off: its header goes on to byte {self.at + count} at least, and the file has "
                f"{len(self._content)}"
            )


def _plain(kind: _Value, value: Any) -> Any:
    """A scalar; a float32 becomes its shortest decimal number, such as 1e-5, as in a ``config.json``."""
    return float(str(np.float32(value))) if kind is _Value.FLOAT32 else value
