"""A checkpoint in FP8, made of one that is not quantised.

Blocks of 128 x 128 of each matrix of the layers' products share a scale: the layout that Qwen publishes.
Embeddings, logits, norms and routers stay as they are. Parameters pass one by one.
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
from jetspec_jax.config.quantization import fp8_json
from jetspec_jax.models import dtype_of
from jetspec_jax.models.quantized import SCALES, VALUES
from jetspec_jax.models.scale_key import ScaleKey
from pallas_kernels.quantized import FP8, LARGEST

#: Outputs and inputs of a block.
BLOCK = 128


@dataclass
class Rounding:
    """What quantising has changed, as root mean squares relative to the weights'.

    Attributes:
        worst: The matrix that has changed most.
        worst_relative: By how much.
    """

    worst: str = ""
    worst_relative: float = 0.0
    _changed: float = 0.0
    _weights: float = 0.0

    @property
    def relative(self) -> float:
        """Of all quantised weights together."""
        return math.sqrt(self._changed / max(self._weights, 1e-300))

    def add(self, name: str, weights: np.ndarray, rounded: np.ndarray) -> None:
        """Counts a matrix."""
        changed = float(np.sum(np.square(rounded - weights, dtype=np.float64)))
        whole = float(np.sum(np.square(weights, dtype=np.float64)))
        self._changed, self._weights = self._changed + changed, self._weights + whole
        if (own := math.sqrt(changed / max(whole, 1e-300))) >= self.worst_relative:
            self.worst, self.worst_relative = name, own


def to_fp8(
    source: str | Path | Checkpoint,
    destination: str | Path,
    *,
    dtype: str = STORED,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[Conversion, Rounding]:
    """Quantises a target or a draft head of any layout, to a Hugging Face folder.

    Args:
        source: What is not quantised, or what `locate` found.
        destination: The folder to write; it must not exist.
        dtype: "stored", or the type of all that is not quantised.
        max_shard_bytes: Tensors of more bytes than this go into several files and an index.

    Raises:
        FileExistsError: The destination exists.
        FileNotFoundError: The source cannot be found or fetched.
        CheckpointError: It is quantised already, or its family is not read in FP8, or as for `to_orbax`.
        OSError: The destination cannot be written; nothing is left of it.
    """
    refuse_existing(Path(destination))
    checkpoint = locate(source)
    raw, config = _quantised_config(checkpoint)
    left_out = {}
    if checkpoint.layout == "huggingface":
        left_out = read_headers(checkpoint.folder).plan(checkpoint.config).unused
    given, error = checkpoint.opened(parse_dtype(dtype)), Rounding()
    parameters = {parameter.path: parameter for parameter in expected_parameters(config)}

    @functools.lru_cache(maxsize=1)  # scales and values follow each other
    def made(path: ParameterPath) -> Mapping[str, np.ndarray]:
        pair = [parameters[(*path, part)] for part in (VALUES, SCALES)]
        arrays = _quantised(np.asarray(given[path]), pair[0], pair[1], error)
        return dict(zip((VALUES, SCALES), arrays, strict=True))

    def unread(parameter: Parameter) -> Unread:
        if parameter.path in given:
            return given[parameter.path]
        *path, part = parameter.path
        own = functools.partial(lambda path, part: made(path)[part], tuple(path), str(part))
        return Unread(parameter.shape, dtype_of(config, parameter.path, np.dtype(np.float32)), own)

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
    """The ``config.json`` of the quantised checkpoint, which lists what stays as it is, and what it says."""
    if checkpoint.raw.get("quantization_config") is not None:
        raise CheckpointError(f"{checkpoint.folder} is quantised already, as its quantization_config says")
    raw = {**checkpoint.raw, "quantization_config": fp8_json(BLOCK)}
    ignored = [key for key in checkpoint.raw if not key.startswith("_")]

    def parsed() -> Any:
        with content_of(checkpoint.folder):
            return parse_config(raw, ignore_config_keys=ignored, where=str(checkpoint.folder))

    # Other readers quantise every matrix but an embedding that is not listed.
    kept = [
        key.name.removesuffix(".weight")
        for parameter in expected_parameters(parsed())
        for key in parameter.forms[0]
        if parameter.path[-1] not in (VALUES, SCALES, "embed_tokens")
        and key.name.endswith(".weight")
        and len(key.file_shapes(parameter.shape)[0]) == 2
    ]
    raw["quantization_config"]["modules_to_not_convert"] = kept
    return raw, parsed()


def _quantised(
    weights: np.ndarray, values: Parameter, scales: Parameter, error: Rounding
) -> tuple[np.ndarray, np.ndarray]:
    """A parameter's values and scales, of its matrices as the file has them."""
    made = np.empty(values.shape, FP8), np.empty(scales.shape, np.float32)
    for key, scale in zip(values.forms[0], scales.forms[0], strict=True):
        assert isinstance(scale, ScaleKey)
        matrix = key.to_file(weights).astype(np.float32)
        largest = np.abs(matrix)
        for axis, block in zip((-2, -1), scale.block, strict=True):
            largest = np.maximum.reduceat(largest, np.arange(0, matrix.shape[axis], block), axis=axis)
        own = largest / np.float32(LARGEST)
        # Weights as small as that are zeros, which any scale has.
        own = np.where(own >= np.finfo(np.float32).tiny, own, np.float32(1))
        spread = own
        for axis, block in zip((-2, -1), scale.block, strict=True):
            spread = np.repeat(spread, block, axis=axis).take(range(matrix.shape[axis]), axis=axis)
        rounded = (matrix / spread).astype(FP8)
        error.add(key.name, matrix, rounded.astype(np.float32) * spread)
        key.from_file(made[0], rounded)
        scale.from_file(made[1], own)
    return made
