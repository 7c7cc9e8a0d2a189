"""A safetensors file mapped into memory: tensors are views of the file.

The library ``safetensors`` would copy tensors, and holds the GIL while it does.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jetspec_jax.checkpoint.content import CheckpointError, check_regular, content_of
from jetspec_jax.checkpoint.tensor_plan import READ_DTYPES, Stored
from jetspec_jax.config.fields import HEADER, check_values

# Bytes of a header that are read at a time.
_PART = 2**20


@dataclass(frozen=True, eq=False)
class TensorFile:
    """An opened file with a valid header."""

    path: Path
    stored: Mapping[str, Stored]
    _content: np.ndarray
    _places: Mapping[str, tuple[int, int]]

    @classmethod
    def open(cls, path: Path) -> "TensorFile":
        """Reads and checks the header of a file."""
        check_regular(path)
        try:
            _check_header(path)
            # The library checks that the tensors fill the file without gaps.
            with safe_open(path, framework="numpy"):
                pass
            content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        header.pop("__metadata__", None)
        stored = {name: Stored(tuple(about["shape"]), about["dtype"]) for name, about in header.items()}
        places = {name: tuple(start + at for at in header[name]["data_offsets"]) for name in stored}
        return cls(path, stored, content, places)

    def tensor(self, name: str) -> np.ndarray:
        """A view of a tensor of a supported type."""
        shape, dtype = self.stored[name]
        start, stop = self._places[name]
        return self._content[start:stop].view(READ_DTYPES[dtype]).reshape(shape)


def _check_header(path: Path) -> None:
    """Refuses a header with too many values before the library parses it."""
    with path.open("rb") as file, content_of(path):
        size = int.from_bytes(file.read(8), "little")
        if size <= HEADER.bytes:  # else the library refuses it
            parts = (file.read(min(_PART, size - start)) for start in range(0, size, _PART))
            check_values(parts, size, HEADER, f"the header of {path}")
