"""Writes checkpoints in Hugging Face layout atomically, one file's tensors at a time."""

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import save_file
from tqdm import tqdm

from jetspec_jax.checkpoint.files import is_inside, new_folder, refuse_existing, write_files
from jetspec_jax.checkpoint.reading import INDEX
from jetspec_jax.checkpoint.tensor_plan import ParameterPath, expected_parameters, stored_types
from jetspec_jax.config import DraftHeadConfig, ModelConfig, parse_config
from jetspec_jax.models import Weights, dtype_of, kept_packed, quantization_of
from jetspec_jax.models.key_table import Key
from jetspec_jax.models.mxfp4 import without_mxfp4
from jetspec_jax.progress import unseen

#: Bytes of tensors per file; larger checkpoints are written as several files.
MAX_SHARD_BYTES = 5 * 10**9


def save_checkpoint(
    folder: str | Path,
    raw_config: Mapping[str, Any],
    weights: Weights,
    *,
    dtype: str | None = "bfloat16",
    extra_files: Mapping[str, str | bytes] | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    config: ModelConfig | DraftHeadConfig | None = None,
) -> None:
    """Writes a target or a draft head in Hugging Face layout atomically.

    Args:
        folder: The folder to create; it must not exist.
        raw_config: The ``config.json``, which also tells a target from a head. A quantization_config of MXFP4
            is removed unless experts are packed.
        weights: The parameters: arrays, or placeholders such as `Unread`, each of which is made once, when it
            is written.
        dtype: The type to store, with the exceptions of `dtype_of`; None stores each parameter in its type.
        extra_files: Further files by name (tokenizer.json, generation_config.json, ...). A file config.json
            replaces ``raw_config``.
        max_shard_bytes: Larger checkpoints are written as several files with an index. A single larger tensor
            gets a separate file.
        config: The parsed ``raw_config``; needed if unknown keys were ignored when it was read. None parses
            ``raw_config`` and allows no unknown keys.

    Raises:
        FileExistsError: The folder exists.
        ValueError: The config is invalid, the parameters are not the config's or have an unsupported type, or
            an extra file would be outside the folder.
        OSError: The disk is full or cannot be written.
    """
    folder, extra_files = Path(folder), extra_files or {}
    if outside := [name for name in extra_files if not is_inside(name)]:
        raise ValueError(f"extra_files lie outside the folder: {outside}")
    refuse_existing(folder)
    leaves = nnx.traversals.flatten_mapping(weights)
    if config is None:
        config = parse_config(raw_config)
        packed = any(getattr(leaf, "dtype", None) == np.uint8 for leaf in leaves.values())
        if isinstance(config, ModelConfig) and packed:
            config = kept_packed(config)
    quantization = quantization_of(config)
    if quantization is None or not quantization.is_mxfp4:
        raw_config = without_mxfp4(raw_config)
    plan = expected_parameters(config)
    expected = {parameter.path: parameter.shape for parameter in plan}
    differing = sorted(
        ".".join(map(str, path))
        for path in expected.keys() | leaves.keys()
        if path not in leaves or expected.get(path) != getattr(leaves[path], "shape", None)
    )
    if differing:
        raise ValueError(f"these parameters are not those of the config: {differing}")

    # The tensors of a parameter are written in sequence, so the last parameter is cached.
    @functools.lru_cache(maxsize=1)
    def made_of(path: ParameterPath) -> np.ndarray:
        return np.asarray(leaves[path])

    tensors = {}
    for parameter in plan:
        value = leaves[parameter.path]
        to = value.dtype if dtype is None else dtype_of(config, parameter.path, jnp.dtype(dtype))
        if to not in (types := stored_types(config, parameter.path)):
            raise ValueError(f"{parameter.name} is {to}; supported types to store: {list(types)}")
        make = functools.partial(made_of, parameter.path)
        tensors |= {key.name: _FileTensor(key, parameter.shape, to, make) for key in parameter.forms[0]}
    shards = _split(tensors, max_shard_bytes)
    files: dict[str, str | bytes] = {"config.json": json.dumps(raw_config, indent=2) + "\n"}
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {name: file for file, shard in shards.items() for name in sorted(shard)}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files[INDEX] = json.dumps(index, indent=2) + "\n"
    with new_folder(folder) as partial:
        bar = tqdm(shards.items(), desc=f"writing {folder.name}", unit=" files", delay=1, disable=unseen())
        for file, shard in bar:
            made = {name: tensor.make() for name, tensor in shard.items()}
            try:
                save_file(made, partial / file, metadata={"format": "pt"})
            except SafetensorError as error:  # for example a full disk
                raise OSError(f"{folder} cannot be written: {error}") from error
            del made  # frees the tensors before the next file's are made
            (partial / file).chmod(0o644)  # the library creates it with mode 0o600
        write_files(partial, {**files, **extra_files})


@dataclass(frozen=True)
class _FileTensor:
    """A tensor to write, made on demand."""

    key: Key
    shape: tuple[int, ...]
    dtype: Any
    parameter: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.key.file_shapes(self.shape)[0]) * self.dtype.itemsize

    def make(self) -> np.ndarray:
        return self.key.to_file(self.parameter()).astype(self.dtype, copy=False)


def _split(tensors: Mapping[str, _FileTensor], limit: int) -> dict[str, dict[str, _FileTensor]]:
    """Distributes tensors to files in order, each filled up to the limit."""
    shards: list[dict[str, _FileTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
