"""The two conversions. Neither needs a device, nor memory for the weights: parameters pass one by one.

What is held is a parameter, and of safetensors that are written a file's tensors.
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

    Args:
        source: An Orbax folder or a GGUF file, or what `locate` found.
        destination: The folder to write; it must not exist.
        dtype: As for `to_orbax`.
        max_shard_bytes: Tensors of more bytes than this go into several files and an index.

    Raises:
        FileExistsError: The destination exists.
        FileNotFoundError: There is no such folder.
        CheckpointError: As for `read_orbax_weights` and `read_weights`; or a value is not finite in the type
            that is named.
        ValueError: It is neither; or tensors of a GGUF file that make up one parameter are of different types
            and none is named.
        OSError: The destination cannot be written; nothing is left of it.
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
    """The type that a user's word stands for; None for "stored".

    Raises:
        ValueError: The word is none of those known.
    """
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
    """What to report of a conversion that is done."""
    return Conversion(
        kind=checkpoint.kind,
        source=checkpoint.folder,
        destination=Path(destination),
        layout=layout,
        parameters=len(arrays),
        nbytes=sum(array.nbytes for array in arrays),
        left_out=left_out or {},
    )
