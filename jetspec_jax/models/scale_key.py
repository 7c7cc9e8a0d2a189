"""The scales of FP8 matrices: their tensors in files, and their blocks in memory.

A file has a scale for each block of a matrix, ``[outputs, inputs]``. In memory the matrix's axes may be split
into several, and a block is the part of a file's block that is contiguous along each axis. Example: heads of
64 elements, in blocks of 128 x 128::

    parameter [M, H, E]  ->  matrix [(H E), M]      block of the file (128, 128), in memory (128, 1, 64)
"""

import math
from dataclasses import dataclass, fields

import numpy as np

from jetspec_jax.config.quantization import Quantization
from jetspec_jax.models.key_table import Each, Key, ShardRows, one_by_one
from jetspec_jax.models.layout import parse_layout
from pallas_kernels.quantized import LARGEST


def check_fp8_scales(scales: np.ndarray, dtype: np.dtype, *, allow_nonfinite: bool = False) -> None:
    """Checks that scales are positive, and so small that every weight is finite.

    ``dtype`` is the type in which products have their weights.
    """
    wide = scales.astype(np.float32)
    if (wrong := wide[wide <= 0]).size:
        raise ValueError(f"a scale is {wrong[0]:g}; scales of FP8 weights must be positive")
    if allow_nonfinite:
        return
    with np.errstate(over="ignore"):
        weights = (wide * np.float32(LARGEST)).astype(dtype)
    if (wrong := wide[~np.isfinite(weights.astype(np.float32))]).size:
        raise ValueError(
            f"a scale is {wrong[0]:g}; times {LARGEST:g}, the largest value of FP8, "
            f"it is not finite in {dtype}"
        )


def shared_axes(key: Key, shape: tuple[int, ...], quantization: Quantization) -> tuple[int, ...]:
    """The number of weights that share a scale along each axis of a parameter, by the file's blocks."""
    shared, layout = [1] * len(shape), parse_layout(key.layout)
    picks = key.picks(len(shape))
    axes = [axis for axis, pick in enumerate(picks) if not isinstance(pick, int)]
    whole = {axis for axis, pick in enumerate(picks) if pick == slice(None)}
    ordered = iter(axes[place] for place in layout.order)
    merged = [[next(ordered) for _ in range(count)] for count in layout.merged]
    for group, block in zip(merged[-2:], (quantization.rows, quantization.columns), strict=True):
        for place, axis in enumerate(group):
            if axis not in whole:
                continue
            if block is None:
                shared[axis] = shape[axis]
            elif len(group) == 1:
                shared[axis] = min(block, shape[axis])
            elif place == len(group) - 1:
                shared[axis] = math.gcd(block, shape[axis])
    return tuple(shared)


@dataclass(frozen=True)
class ScaleKey(Key):
    """The entry of a quantised parameter's scales; only its name differs from the entry of the values.

    ``shape`` is that of the values. ``shared`` and ``block`` are the values per scale along each axis of the
    parameter and of the file's matrix.
    """

    shape: tuple[int, ...] = ()
    shared: tuple[int, ...] = ()
    block: tuple[int, int] = (1, 1)

    @classmethod
    def of_values(
        cls,
        key: Key,
        quantization: Quantization,
        shape: tuple[int, ...],
        shared: tuple[int, ...],
    ) -> "ScaleKey":
        """The entry of the scales that belongs to an entry of values."""
        values = {field.name: getattr(key, field.name) for field in fields(Key)}
        [matrix] = key.file_shapes(shape)
        columns = matrix[-1] if quantization.columns is None else quantization.columns
        block = quantization.rows, columns
        values["name"] += quantization.suffix
        return cls(**values, shape=shape, shared=shared, block=block)

    def file_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The shape of the scales in the file; ``shape`` is ignored."""
        [(*stack, rows, columns)] = super().file_shapes(self.shape)
        return ((*stack, -(-rows // self.block[0]), -(-columns // self.block[1])),)

    def of_part(self, shard: ShardRows) -> tuple[Key, list[list[np.ndarray]]] | None:
        """As in `Key`; ``shard.rows`` are, along each axis, the first values of the shard's blocks."""
        if (found := super().of_part(shard)) is None:
            return None
        entry, [in_file] = found
        *stack, rows, columns = in_file
        plain = Key(**{field.name: getattr(entry, field.name) for field in fields(Key)})
        return plain, [[*stack, rows // self.block[0], columns // self.block[1]]]

    def from_file(self, parameter: np.ndarray, *tensors: np.ndarray, each: Each = one_by_one) -> None:
        """Fills the entry's part of a parameter's scales from the file's tensor."""
        entry, places = self._everywhere()
        entry.from_file(parameter, tensors[0][places], each=each)

    def to_file(self, parameter: np.ndarray) -> np.ndarray:
        """The file's scales: the inverse of `from_file`."""
        entry, places = self._everywhere()
        [shape] = self.file_shapes(parameter.shape)
        out = np.empty(shape, parameter.dtype)
        out[places] = entry.to_file(parameter)
        return out

    def _everywhere(self) -> tuple[Key, tuple[np.ndarray, ...]]:
        """The entry of all scales in memory, and the index of each scale in the file."""
        first = tuple(np.arange(0, size, step) for size, step in zip(self.shape, self.shared, strict=True))
        found = self.of_part(ShardRows(first, self.shape, (1,) * len(first)))
        assert found is not None
        entry, [rows] = found
        return entry, np.ix_(*rows)
