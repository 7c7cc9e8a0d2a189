"""The tensors of a GGUF file under their published names, widened when they are read."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from jetspec_jax.checkpoint.content import content_of
from jetspec_jax.checkpoint.gguf.architectures import ARCHITECTURES, name_of
from jetspec_jax.checkpoint.gguf.header import Header, Kind, TensorInfo, read_header
from jetspec_jax.checkpoint.tensor_plan import FILE_DTYPES, Stored

# Kinds whose bytes are values; all others are widened to float32.
_PLAIN = {Kind.F32: "F32", Kind.BF16: "BF16", Kind.F16: "F16"}


@dataclass(frozen=True, eq=False)
class Widened:
    """A tensor in the place of a NumPy array: an index reads and widens the rows that it names alone.

    Attributes:
        kind: How its values are stored.
        rows: The bytes of its rows: of a matrix ``[rows, bytes]``, of a vector ``[bytes]``.
        dtype: Of the values.
        order: Which stored row each row is, where that is another one.
        offset: What is added to stored values.
    """

    kind: Kind
    rows: np.ndarray
    dtype: np.dtype
    order: np.ndarray | None = None
    offset: float = 0.0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The whole tensor."""
        return self[:]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Some rows, and of them some columns: a slice, or a slice for each axis."""
        first, *others = index if isinstance(index, tuple) else (index,)
        order = slice(None) if self.order is None else self.order
        if self.rows.ndim == 1:
            return self._values(self.rows)[order][first]
        rows = self.rows[first] if self.order is None else self.rows[self.order[first]]
        return self._values(rows)[(slice(None), *others)]

    def _values(self, rows: np.ndarray) -> np.ndarray:
        if self.kind in _PLAIN:
            values = rows.view(FILE_DTYPES[_PLAIN[self.kind]])
        else:
            with np.errstate(all="ignore"):  # what is not finite is named later
                values = gguf.dequantize(rows, self.kind)
        return values.astype(np.float32) + np.float32(self.offset) if self.offset else values


@dataclass(frozen=True, eq=False)
class GgufTensors:
    """A file's tensors; used like a `TensorFile`.

    Attributes:
        path: The file.
        stored: The tensors by their published names. Those that llama.cpp alone knows keep its names.
    """

    path: Path
    stored: Mapping[str, Stored]
    _tensors: Mapping[str, Widened]

    @classmethod
    def open(cls, path: Path) -> "GgufTensors":
        """Reads the header of a file.

        Raises:
            CheckpointError: As for `read_header`; or the architecture is not supported.
            FileNotFoundError: There is no such file.
        """
        header = read_header(path)
        with content_of(path):
            return cls.of(header)

    @classmethod
    def of(cls, header: Header) -> "GgufTensors":
        """The tensors of a header; raises ValueError where `open` raises CheckpointError."""
        name = name_of(header)
        own = ARCHITECTURES[name]
        heads = {
            part: header.metadata.get(f"{name}.attention.{part}") for part in ("head_count", "head_count_kv")
        }
        stored, tensors = {}, {}
        for given, info in header.tensors.items():
            if given in own.unread:
                continue
            published = own.published(given) or given
            offset = -1.0 if own.centered_norms and "norm" in given else 0.0
            order = None
            if own.paired_rows and ".self_attn.q_proj." in published:
                order = _paired(info, heads["head_count"])
            elif own.paired_rows and ".self_attn.k_proj." in published:
                order = _paired(info, heads["head_count_kv"] or heads["head_count"])
            dtype = (
                "F32"
                if offset
                else _PLAIN.get(info.kind, "F32" if _is_widened(info.kind) else info.kind.name)
            )
            values = header.content[info.start : info.start + info.nbytes].reshape(*info.shape[:-1], -1)
            # Of other kinds nothing is read: the plan refuses them.
            as_read = FILE_DTYPES.get(dtype, jnp.dtype(jnp.float32))
            if "{}" not in published:
                stored[published] = Stored(info.shape, dtype)
                tensors[published] = Widened(info.kind, values, as_read, order, offset)
                continue
            for expert in range(info.shape[0]):
                one = published.format(expert)
                stored[one] = Stored(info.shape[1:], dtype)
                tensors[one] = Widened(info.kind, values[expert], as_read)
        return cls(header.path, stored, tensors)

    def tensor(self, name: str) -> Widened:
        """A tensor, of a type that is read."""
        return self._tensors[name]


def _paired(info: TensorInfo, heads: Any) -> np.ndarray | None:
    """Which stored row each row of queries or keys is.

    In a head of four elements, of which 0 turns with 2 and 1 with 3, a file has the rows in the order
    ``0 2 1 3``::

        row of the head      0 1 2 3
        its row in the file  0 2 1 3

    Returns:
        The rows; None where heads and rows do not go together, which the config's shapes tell of.
    """
    rows = info.shape[0]
    if not isinstance(heads, int) or heads < 1 or rows % (2 * heads):
        return None
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


@functools.cache
def _is_widened(kind: Kind) -> bool:
    """Whether the package widens values of a kind."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
