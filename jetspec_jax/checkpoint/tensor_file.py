"""A file of safetensors, mapped into memory: its tensors are arrays of the file, and nothing is copied.

The library gives copies, and lets no other thread run while it makes them.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from jetspec_jax.checkpoint.content import CheckpointError, check_regular
from jetspec_jax.checkpoint.tensor_plan import FILE_BYTES, FILE_DTYPES, FILE_FP8, Stored
from pallas_kernels.quantized import FP8

# The types that are read: floats, FP8, and the bytes of MXFP4.
_DTYPES = {**FILE_DTYPES, FILE_FP8: FP8, FILE_BYTES: np.dtype(np.uint8)}


@dataclass(frozen=True, eq=False)
class TensorFile:
    """A file whose header is known to be right.

    Attributes:
        path: The file.
        stored: Its tensors by name.
    """

    path: Path
    stored: Mapping[str, Stored]
    _content: np.ndarray
    _places: Mapping[str, tuple[int, int]]

    @classmethod
    def open(cls, path: Path) -> "TensorFile":
        """Reads the header of a file.

        Raises:
            CheckpointError: It is corrupt, or no file.
        """
        check_regular(path)
        try:
            # The library checks that tensors follow each other, up to the file's end.
            with safe_open(path, framework="numpy") as file:
                parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
                stored = {
                    name: Stored(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()
                }
            content = np.asarray(np.memmap(path, np.uint8, mode="r"))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file: {error}") from error
        start = 8 + int.from_bytes(content[:8].tobytes(), "little")
        header = json.loads(content[8:start].tobytes())
        places = {name: tuple(start + at for at in header[name]["data_offsets"]) for name in stored}
        return cls(path, stored, content, places)

    def tensor(self, name: str) -> np.ndarray:
        """A tensor, of a type that is read, as it lies in the file.

        Raises:
            ValueError: The file has changed meanwhile.
        """
        shape, dtype = self.stored[name]
        start, stop = self._places[name]
        return self._content[start:stop].view(_DTYPES[dtype]).reshape(shape)
