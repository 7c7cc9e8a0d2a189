"""The two conversions. Neither needs a device, nor memory for more than about one copy of the weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from convert.folders import Checkpoint, converted_files, locate
from convert.orbax_io import read_orbax, write_orbax
from jetspec_jax.checkpoint.content import CheckpointError
from jetspec_jax.checkpoint.files import refuse_existing
from jetspec_jax.checkpoint.finite import is_finite
from jetspec_jax.checkpoint.reading import put, read_headers
from jetspec_jax.checkpoint.tensor_plan import FILE_DTYPES
from jetspec_jax.checkpoint.writing import MAX_SHARD_BYTES, save_checkpoint
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights, dtype_of

#: The word for leaving each parameter in the type that it is stored in.
STORED = "stored"


@dataclass(frozen=True)
class Conversion:
    """What a conversion did.

    Attributes:
        kind: "target" or "draft head".
        source: The folder that was read.
        destination: The folder that was written.
        layout: What was written: "orbax" or "huggingface".
        parameters: Number of arrays in the weights.
        nbytes: Their bytes.
        left_out: Names of stored tensors that were not converted, because no parameter is made of them, by
            what they are.
    """

    kind: str
    source: Path
    destination: Path
    layout: str
    parameters: int
    nbytes: int
    left_out: Mapping[str, Sequence[str]] = field(default_factory=dict)


def to_orbax(source: str | Path | Checkpoint, destination: str | Path, *, dtype: str = STORED) -> Conversion:
    """Converts a Hugging Face checkpoint, a target or a draft head, to an Orbax folder.

    Args:
        source: A folder or a hub id; or what `locate` found, which may have ignored unknown config keys or
            allowed values that are not finite.
        destination: The folder to write; it must not exist.
        dtype: "stored", or the type to give to all parameters. ``config.json`` stays as it is in any case,
            but for MXFP4, which is widened and so no longer named there.

    Raises:
        FileExistsError: The destination exists.
        FileNotFoundError: The source cannot be found or fetched.
        CheckpointError: Its tensors are not its config's, or a file is damaged, or values are not finite, as
            they are stored or in the type that is named.
        ValueError: It is no Hugging Face checkpoint, or those of one parameter are of different types and
            none is named.
        OSError: The destination cannot be written; nothing is left of it.
    """
    refuse_existing(Path(destination))
    checkpoint = _source(source, "huggingface")
    to = parse_dtype(dtype)
    left_out = read_headers(checkpoint.folder).plan(checkpoint.config).unused
    weights: Weights = {}
    for path, value in checkpoint.parameters(to):
        put(weights, path, value)
    write_orbax(destination, checkpoint.kind, converted_files(checkpoint.folder), weights)
    return _conversion(checkpoint, destination, "orbax", weights, left_out)


def to_huggingface(
    source: str | Path | Checkpoint,
    destination: str | Path,
    *,
    dtype: str = STORED,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Converts an Orbax folder to a Hugging Face checkpoint in the published layout.

    Args:
        source: An Orbax folder, or what `locate` found.
        destination: The folder to write; it must not exist.
        dtype: As for `to_orbax`.
        max_shard_bytes: Tensors of more bytes than this go into several files and an index.

    Raises:
        FileExistsError: The destination exists.
        FileNotFoundError: There is no such folder.
        CheckpointError: As for `read_orbax`.
        ValueError: It is no Orbax folder, or a value has no counterpart in the type that is named.
        OSError: The destination cannot be written; nothing is left of it.
    """
    refuse_existing(Path(destination))
    checkpoint = _source(source, "orbax")
    to = parse_dtype(dtype)
    weights = read_orbax(checkpoint)
    if to is not None:
        cast_in_place(weights, checkpoint.config, to)
        if not checkpoint.allow_nonfinite:
            _refuse_lost(weights, dtype)
    save_checkpoint(
        destination,
        checkpoint.raw,
        weights,
        dtype=None,
        extra_files=converted_files(checkpoint.folder),
        max_shard_bytes=max_shard_bytes,
        config=checkpoint.config,
    )
    return _conversion(checkpoint, destination, "huggingface", weights)


def parse_dtype(dtype: str) -> Any:
    """The type that a user's word stands for; None for "stored".

    Raises:
        ValueError: The word is none of those known.
    """
    words = {str(known): known for known in FILE_DTYPES.values()}
    if dtype != STORED and dtype not in words:
        raise ValueError(f"dtype must be one of {', '.join([STORED, *words])}, not {dtype!r}")
    return words.get(dtype)


def named(weights: Weights) -> dict[str, Any]:
    """The parameters by their dotted names."""
    flat = nnx.traversals.flatten_mapping(weights)
    return {".".join(map(str, path)): value for path, value in flat.items()}


def cast_in_place(weights: Weights, config: ModelConfig | DraftHeadConfig, dtype: np.dtype) -> None:
    """Gives parameters a type, as far as `dtype_of` lets it, one by one, so that only one is there twice."""
    flat = nnx.traversals.flatten_mapping(weights)
    # What is not finite is for the caller to see; a warning per array would say less.
    with np.errstate(over="ignore", invalid="ignore"):
        for path in list(flat):
            put(weights, path, flat.pop(path).astype(dtype_of(config, path, dtype), copy=False))


def _source(source: str | Path | Checkpoint, layout: str) -> Checkpoint:
    checkpoint = locate(source)
    if checkpoint.layout != layout:
        names = {"huggingface": "a Hugging Face folder", "orbax": "an Orbax folder"}
        raise CheckpointError(f"{checkpoint.folder} is {names[checkpoint.layout]}, not {names[layout]}")
    return checkpoint


def _refuse_lost(weights: Weights, dtype: str) -> None:
    """Raises ValueError where a type could not hold a value."""
    names = [name for name, value in named(weights).items() if not is_finite(value)]
    if names:
        raise ValueError(f"values that are not finite in {dtype}, in {names}")


def _conversion(
    checkpoint: Checkpoint,
    destination: str | Path,
    layout: str,
    weights: Weights,
    left_out: Mapping[str, Sequence[str]] | None = None,
) -> Conversion:
    values = named(weights).values()
    return Conversion(
        kind=checkpoint.kind,
        source=checkpoint.folder,
        destination=Path(destination),
        layout=layout,
        parameters=len(values),
        nbytes=sum(value.nbytes for value in values),
        left_out=left_out or {},
    )
