"""The tensors of a GGUF file by their published names, dequantised when they are read."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np

from jetspec_jax.checkpoint.content import CheckpointError, content_of
from jetspec_jax.checkpoint.gguf.architectures import ARCHITECTURES, name_of
from jetspec_jax.checkpoint.gguf.header import Kind, TensorInfo, read_header
from jetspec_jax.checkpoint.tensor_plan import FILE_DTYPES, Stored
from jetspec_jax.config.fields import is_int

#: The most matrices of experts, in all layers together: three times those of the largest published model.
MAX_EXPERT_MATRICES = 2**17
# Kinds without quantisation; all others are dequantised to float32.
_PLAIN = {Kind.F32: "F32", Kind.BF16: "BF16", Kind.F16: "F16"}


@dataclass(frozen=True, eq=False)
class Widened:
    """A tensor that can be indexed like a NumPy array; indexing reads and dequantises only the given rows.

    Attributes:
        kind: The storage type of its values.
        rows: The stored bytes: ``[rows, bytes]`` for a matrix, ``[bytes]`` for a vector.
        dtype: The type of the values.
        heads: The number of heads whose rows are stored for interleaved rotary embeddings; 0 if the rows
            are stored in their order.
        offset: A number added to stored values.
    """

    kind: Kind
    rows: np.ndarray
    dtype: np.dtype
    heads: int = 0
    offset: float = 0.0

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:]

    def __getitem__(self, index: Any) -> np.ndarray:
        """Selected rows and columns: a slice of rows, or one slice per axis."""
        first, *others = index if isinstance(index, tuple) else (index,)
        if self.rows.ndim == 1:
            values = self._values(self.rows)
            return (values[_paired(len(values), self.heads)] if self.heads else values)[first]
        rows = self.rows[_paired(len(self.rows), self.heads)[first] if self.heads else first]
        return self._values(rows)[(slice(None), *others)]

    def _values(self, rows: np.ndarray) -> np.ndarray:
        if self.kind in _PLAIN:
            values = rows.view(FILE_DTYPES[_PLAIN[self.kind]])
        else:
            with np.errstate(all="ignore"):  # values that are not finite are reported later
                values = gguf.dequantize(rows, self.kind)
        return values.astype(np.float32) + np.float32(self.offset) if self.offset else values


@dataclass(frozen=True, eq=False)
class GgufTensors:
    """A file's tensors, with the interface of `TensorFile`.

    Names of unknown tensors end in "(unknown to ARCHITECTURE)".
    """

    path: Path
    stored: Mapping[str, Stored]
    _tensors: Mapping[str, Widened]

    @classmethod
    def open(cls, path: Path) -> "GgufTensors":
        """Reads the header of a file, see `read_header`."""
        header = read_header(path)
        with content_of(path):
            name = name_of(header)
        architecture = ARCHITECTURES[name]
        heads = {
            part: header.metadata.get(f"{name}.attention.{part}") for part in ("head_count", "head_count_kv")
        }
        stored, tensors, num_experts = {}, {}, 0
        for gguf_name, info in header.tensors.items():
            if gguf_name in architecture.unread:
                continue
            known = architecture.published(gguf_name)
            # An unknown tensor must not pass for a published one, whose name it may have.
            published = known or f"{gguf_name} (unknown to {name})"
            offset = -1.0 if architecture.centered_norms and "norm" in gguf_name else 0.0
            paired = None
            if architecture.paired_rows and ".self_attn.q_proj." in published:
                paired = heads["head_count"]
            elif architecture.paired_rows and ".self_attn.k_proj." in published:
                paired = heads["head_count_kv"] or heads["head_count"]
            widened = "F32" if _is_widened(info.kind) else info.kind.name
            dtype = "F32" if offset else _PLAIN.get(info.kind, widened)
            values = header.content[info.start : info.start + info.nbytes].reshape(*info.shape[:-1], -1)
            # Tensors of unsupported kinds are never read: the plan refuses them.
            as_read = FILE_DTYPES.get(dtype, jnp.dtype(jnp.float32))
            if known is None or "{}" not in known:
                stored[published] = Stored(info.shape, dtype)
                tensors[published] = Widened(info.kind, values, as_read, _heads(info, paired), offset)
                continue
            num_experts += info.shape[0]
            if num_experts > MAX_EXPERT_MATRICES:
                raise CheckpointError(
                    f"{path}: {gguf_name} has expert {num_experts:,} of at most {MAX_EXPERT_MATRICES:,}"
                )
            for expert in range(info.shape[0]):
                expert_name = published.format(expert)
                stored[expert_name] = Stored(info.shape[1:], dtype)
                tensors[expert_name] = Widened(info.kind, values[expert], as_read)
        return cls(header.path, stored, tensors)

    def tensor(self, name: str) -> Widened:
        """A tensor of a supported type."""
        return self._tensors[name]


def _heads(info: TensorInfo, heads: Any) -> int:
    """The heads of paired rows; 0 without, or if the rows do not fit, which the check of shapes reports."""
    fits = is_int(heads) and heads > 0 and not info.shape[0] % (2 * heads)
    return heads if fits else 0


def _paired(rows: int, heads: int) -> np.ndarray:
    """The stored row of each row of queries or keys.

    In a head of four elements with the rotary pairs (0, 2) and (1, 3), a file has the rows in the order
    ``0 2 1 3``::

        row of the head      0 1 2 3
        its row in the file  0 2 1 3
    """
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)


@functools.cache
def _is_widened(kind: Kind) -> bool:
    """Whether the package ``gguf`` can dequantise a kind."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
