"""Checkpoints in Hugging Face layout, written whole or not at all, one file's tensors at a time."""

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
from jetspec_jax.checkpoint.tensor_plan import FILE_DTYPES, ParameterPath, expected_parameters, stored_types
from jetspec_jax.config import DraftHeadConfig, ModelConfig, parse_config
from jetspec_jax.models import Weights, dtype_of, kept_packed, quantization_of
from jetspec_jax.models.key_table import Key
from jetspec_jax.models.mxfp4 import without_mxfp4
from jetspec_jax.progress import unseen

#: Bytes of tensors from which on a checkpoint is written in several files.
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
    """Writes a target or a draft head in Hugging Face layout, whole or not at all.

    Args:
        folder: Where to; it must not exist yet.
        raw_config: The ``config.json``, which also says whether this is a target or a head. MXFP4 is left out
            of it unless experts are packed.
        weights: The parameters: arrays, or what stands in their place, such as `Unread`, of which each is
            made when its turn comes, once.
        dtype: The type to store, as far as `dtype_of` lets it; None stores each parameter in its own.
        extra_files: Further files by name (tokenizer.json, generation_config.json, ...). One that is called
            config.json is written in place of ``raw_config``.
        max_shard_bytes: Tensors of more bytes than this go into several files and an index. A single tensor
            that is larger has a file of its own.
        config: What ``raw_config`` says, where its reader ignored unknown keys; they are written too. None
            parses ``raw_config`` and ignores none.

    Raises:
        FileExistsError: The folder exists.
        ValueError: The config is not valid, or the parameters are not its, or of a type that is not stored,
            or a further file would lie outside the folder.
        TypeError: An argument is of another type.
        OSError: The disk is full, or cannot be written.
    """
    folder, extra_files = Path(folder), extra_files or {}
    _check_types(raw_config, weights, dtype, extra_files, max_shard_bytes)
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
    wanted = {parameter.path: parameter.shape for parameter in plan}
    differing = sorted(
        ".".join(map(str, path))
        for path in wanted.keys() | leaves.keys()
        if path not in leaves or wanted.get(path) != getattr(leaves[path], "shape", None)
    )
    if differing:
        raise ValueError(f"these parameters are not those of the config: {differing}")

    # A parameter's tensors follow each other.
    @functools.lru_cache(maxsize=1)
    def made_of(path: ParameterPath) -> np.ndarray:
        return np.asarray(leaves[path])

    tensors = {}
    for parameter in plan:
        value = leaves[parameter.path]
        to = value.dtype if dtype is None else dtype_of(config, parameter.path, jnp.dtype(dtype))
        if to not in (types := stored_types(config, parameter.path)):
            raise ValueError(f"{parameter.name} is {to}; what can be stored is {list(types)}")
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
            except SafetensorError as error:  # a full disk, say
                raise OSError(f"{folder} cannot be written: {error}") from error
            del made  # before there are others
            (partial / file).chmod(0o644)  # the library makes it the owner's alone
        write_files(partial, {**files, **extra_files})


def _check_types(raw_config: Any, weights: Any, dtype: Any, extra_files: Any, max_shard_bytes: Any) -> None:
    """Raises TypeError for what is of another type, and ValueError for what is out of its range."""
    for name, value in (("raw_config", raw_config), ("weights", weights), ("extra_files", extra_files)):
        if not isinstance(value, Mapping):
            raise TypeError(f"{name} must be a mapping, not {type(value).__name__}")
    if not isinstance(dtype, str | None):
        raise TypeError(f"dtype must be a string or None, not {type(dtype).__name__}")
    if dtype is not None and dtype not in (words := [str(own) for own in FILE_DTYPES.values()]):
        raise ValueError(f"dtype must be one of {', '.join(words)}, or None, not {dtype!r}")
    if not isinstance(max_shard_bytes, int) or isinstance(max_shard_bytes, bool):
        raise TypeError(f"max_shard_bytes must be an integer, not {max_shard_bytes!r}")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    for name in extra_files:
        if not isinstance(name, str):
            raise TypeError(f"extra_files must be named by strings, not {name!r}")
        if not is_inside(name):
            raise ValueError(f"extra_files: {name!r} lies outside the folder")


@dataclass(frozen=True)
class _FileTensor:
    """A tensor of a file to be written; it is made when its turn comes."""

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
    """Tensors by the file that they go to, each filled in turn up to the limit."""
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
