"""The two conversions. They need no device, and convert one parameter at a time.

Memory holds one parameter, and for written safetensors the tensors of one file.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flax import nnx

from convert.folders import LAYOUTS, Checkpoint, Layout, converted_files, locate
from convert.orbax_io import write_orbax
from jetspec_jax.checkpoint.content import CheckpointError
from jetspec_jax.checkpoint.files import refuse_existing
from jetspec_jax.checkpoint.reading import read_headers
from jetspec_jax.checkpoint.tensor_plan import FILE_DTYPES
from jetspec_jax.checkpoint.unread import Unread
from jetspec_jax.checkpoint.writing import MAX_SHARD_BYTES, save_checkpoint

#: The word for keeping each parameter's stored type.
STORED = "stored"


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion.

    Attributes:
        kind: "target" or "draft head".
        source: The source folder.
        destination: The written folder.
        layout: The written layout: "orbax" or "huggingface".
        parameters: The number of arrays in the weights.
        nbytes: The bytes of the weights.
        left_out: Names of stored tensors without a parameter, which were not converted, by their reason.
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
        source: A folder, a hub id, or a result of `locate`, which may ignore unknown config keys and allow
            values that are not finite.
        destination: The folder to write, which must not exist.
        dtype: "stored", or the type of all parameters. ``config.json`` does not change, except that MXFP4
            is removed from it, because it is widened.

    Raises:
        FileExistsError: The destination exists.
        FileNotFoundError: The source cannot be found or fetched.
        CheckpointError: The source has another layout, the tensors do not fit the config, a file is damaged,
            or values are not finite in the stored or the requested type.
        ValueError: The tensors of one parameter have different types and ``dtype`` is "stored".
        OSError: The destination cannot be written; no part of it is left.
    """
    refuse_existing(Path(destination))
    checkpoint = _source(source, "huggingface")
    to = parse_dtype(dtype)
    left_out = read_headers(checkpoint.folder).plan(checkpoint.config).unused
    arrays, files = checkpoint.opened(to), converted_files(checkpoint)
    write_orbax(destination, checkpoint.kind, files, nnx.traversals.unflatten_mapping(arrays))
    return conversion_of(checkpoint, destination, "orbax", arrays.values(), left_out)


def to_huggingface(
    source: str | Path | Checkpoint,
    destination: str | Path,
    *,
    dtype: str = STORED,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Conversion:
    """Converts an Orbax folder or a GGUF file to a Hugging Face checkpoint in the published layout.

    More bytes than ``max_shard_bytes`` are split into several files with an index. The other arguments and
    the errors are as for `to_orbax`.
    """
    refuse_existing(Path(destination))
    checkpoint = _source(source, "orbax", "gguf")
    to = parse_dtype(dtype)
    arrays = checkpoint.opened(to)
    save_checkpoint(
        destination,
        checkpoint.raw,
        nnx.traversals.unflatten_mapping(arrays),
        dtype=None,
        extra_files=converted_files(checkpoint),
        max_shard_bytes=max_shard_bytes,
        config=checkpoint.config,
    )
    return conversion_of(checkpoint, destination, "huggingface", arrays.values())


def parse_dtype(dtype: str) -> Any:
    """Parses the name of a type; None for "stored". Raises ValueError for an unknown name."""
    words = {str(known): known for known in FILE_DTYPES.values()}
    if dtype != STORED and dtype not in words:
        raise ValueError(f"dtype must be one of {', '.join([STORED, *words])}, not {dtype!r}")
    return words.get(dtype)


def _source(source: str | Path | Checkpoint, *layouts: Layout) -> Checkpoint:
    checkpoint = locate(source)
    if checkpoint.layout not in layouts:
        wanted = " or ".join(LAYOUTS[layout] for layout in layouts)
        raise CheckpointError(f"{checkpoint.folder} is {LAYOUTS[checkpoint.layout]}, not {wanted}")
    return checkpoint


def conversion_of(
    checkpoint: Checkpoint,
    destination: str | Path,
    layout: str,
    arrays: Collection[Unread],
    left_out: Mapping[str, Sequence[str]] | None = None,
) -> Conversion:
    """Describes a finished conversion."""
    return Conversion(
        kind=checkpoint.kind,
        source=checkpoint.folder,
        destination=Path(destination),
        layout=layout,
        parameters=len(arrays),
        nbytes=sum(array.nbytes for array in arrays),
        left_out=left_out or {},
    )
