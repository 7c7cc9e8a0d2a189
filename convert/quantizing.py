"""Quantises a checkpoint to FP8.

Blocks of 128 x 128 of each matrix in the layers share a scale, in Qwen's published layout. Embeddings,
logits, norms and routers are not quantised. Parameters are quantised one at a time.
"""

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from convert.conversion import STORED, Conversion, conversion_of, parse_dtype
from convert.folders import Checkpoint, converted_files, locate
from jetspec_jax.checkpoint.content import CheckpointError, content_of
from jetspec_jax.checkpoint.files import refuse_existing
from jetspec_jax.checkpoint.reading import read_headers
from jetspec_jax.checkpoint.tensor_plan import Parameter, ParameterPath, expected_parameters
from jetspec_jax.checkpoint.unread import Unread
from jetspec_jax.checkpoint.writing import MAX_SHARD_BYTES, save_checkpoint
from jetspec_jax.config import parse_config
from jetspec_jax.models import dtype_of
from jetspec_jax.models.quantized import SCALES, VALUES
from jetspec_jax.models.scale_key import ScaleKey
from pallas_kernels.quantized import FP8, LARGEST

#: Outputs and inputs of a block.
BLOCK = 128


@dataclass
class Rounding:
    """The error of quantisation: the root mean square of the changes relative to the weights'.

    Attributes:
        worst: The name of the matrix with the largest error.
        worst_relative: The error of that matrix.
    """

    worst: str = ""
    worst_relative: float = 0.0
    _changed: float = 0.0
    _weights: float = 0.0

    @property
    def relative(self) -> float:
        """The error of all quantised weights together."""
        return math.sqrt(self._changed / max(self._weights, 1e-300))

    def add(self, name: str, weights: np.ndarray, rounded: np.ndarray) -> None:
        """Adds a matrix."""
        changed = float(np.sum(np.square(rounded - weights, dtype=np.float64)))
        whole = float(np.sum(np.square(weights, dtype=np.float64)))
        self._changed, self._weights = self._changed + changed, self._weights + whole
        if (relative := math.sqrt(changed / max(whole, 1e-300))) >= self.worst_relative:
            self.worst, self.worst_relative = name, relative


def to_fp8(
    source: str | Path | Checkpoint,
    destination: str | Path,
    *,
    dtype: str = STORED,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[Conversion, Rounding]:
    """Quantises a target or a draft head of any layout, to a Hugging Face folder.

    ``dtype`` is the type of the parameters that are not quantised. The arguments and errors are otherwise as
    for `to_huggingface`.

    Raises:
        CheckpointError: The source is quantised already, or its family is not supported in FP8.
    """
    refuse_existing(Path(destination))
    checkpoint = locate(source)
    raw, config = _quantised_config(checkpoint)
    left_out = {}
    if checkpoint.layout == "huggingface":
        left_out = read_headers(checkpoint.folder).plan(checkpoint.config).unused
    given, error = checkpoint.opened(parse_dtype(dtype)), Rounding()
    parameters = {parameter.path: parameter for parameter in expected_parameters(config)}

    @functools.lru_cache(maxsize=1)  # values and scales of a parameter are read one after the other
    def made(path: ParameterPath) -> Mapping[str, np.ndarray]:
        pair = [parameters[(*path, part)] for part in (VALUES, SCALES)]
        arrays = _quantised(np.asarray(given[path]), pair[0], pair[1], error)
        return dict(zip((VALUES, SCALES), arrays, strict=True))

    def unread(parameter: Parameter) -> Unread:
        if parameter.path in given:
            return given[parameter.path]
        *path, part = parameter.path
        read = functools.partial(lambda path, part: made(path)[part], tuple(path), str(part))
        return Unread(parameter.shape, dtype_of(config, parameter.path, np.dtype(np.float32)), read)

    arrays = {path: unread(parameter) for path, parameter in parameters.items()}
    files = {**converted_files(checkpoint), "config.json": json.dumps(raw, indent=2) + "\n"}
    save_checkpoint(
        destination,
        raw,
        nnx.traversals.unflatten_mapping(arrays),
        dtype=None,
        extra_files=files,
        max_shard_bytes=max_shard_bytes,
        config=config,
    )
    return conversion_of(checkpoint, destination, "huggingface", arrays.values(), left_out), error


def _quantised_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], Any]:
    """The ``config.json`` of the quantised checkpoint, with its unquantised modules, and its parsed form."""
    if checkpoint.raw.get("quantization_config") is not None:
        raise CheckpointError(f"{checkpoint.folder} is quantised already, as its quantization_config says")
    settings: dict[str, Any] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    raw = {**checkpoint.raw, "quantization_config": settings}
    ignored = [key for key in checkpoint.raw if not key.startswith("_")]

    def parsed() -> Any:
        with content_of(checkpoint.folder):
            return parse_config(raw, ignore_config_keys=ignored, where=str(checkpoint.folder))

    # Other engines expect every matrix to be quantised that is neither listed nor an embedding.
    kept = [
        key.name.removesuffix(".weight")
        for parameter in expected_parameters(parsed())
        for key in parameter.forms[0]
        if parameter.path[-1] not in (VALUES, SCALES, "embed_tokens")
        and key.name.endswith(".weight")
        and len(key.file_shapes(parameter.shape)[0]) == 2
    ]
    settings["modules_to_not_convert"] = kept
    return raw, parsed()


def _quantised(
    weights: np.ndarray, values: Parameter, scales: Parameter, error: Rounding
) -> tuple[np.ndarray, np.ndarray]:
    """A parameter's values and scales, computed from its matrices in the file's layout."""
    made = np.empty(values.shape, FP8), np.empty(scales.shape, np.float32)
    for key, scale in zip(values.forms[0], scales.forms[0], strict=True):
        assert isinstance(scale, ScaleKey)
        matrix = key.to_file(weights).astype(np.float32)
        largest = np.abs(matrix)
        for axis, block in zip((-2, -1), scale.block, strict=True):
            largest = np.maximum.reduceat(largest, np.arange(0, matrix.shape[axis], block), axis=axis)
        block_scales = largest / np.float32(LARGEST)
        # A block with a smaller scale is rounded to zeros, for which any scale will do.
        block_scales = np.where(block_scales >= np.finfo(np.float32).tiny, block_scales, np.float32(1))
        spread = block_scales
        for axis, block in zip((-2, -1), scale.block, strict=True):
            spread = np.repeat(spread, block, axis=axis).take(range(matrix.shape[axis]), axis=axis)
        rounded = (matrix / spread).astype(FP8)
        error.add(key.name, matrix, rounded.astype(np.float32) * spread)
        key.from_file(made[0], rounded)
        scale.from_file(made[1], block_scales)
    return made
