"""Orbax folders, as ``python -m convert`` writes them: what marks one, and its weights.

They hold a ``config.json`` and the tokenizer's files as Hugging Face folders do, and in place of safetensors
the parameters in the structure of this library. Nothing of Orbax is imported before one is read.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jetspec_jax
from jetspec_jax.checkpoint.content import CheckpointError, check_regular, read_object
from jetspec_jax.checkpoint.finite import is_finite
from jetspec_jax.checkpoint.reading import put
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights, dtype_of

#: The file that marks an Orbax folder, with its format, version and kind.
MANIFEST = "orbax.json"
FORMAT = "jetspec-jax orbax"
VERSION = 1
#: The subfolder of the parameters.
WEIGHTS = "weights"


def is_orbax(folder: Path) -> bool:
    """Whether a folder is an Orbax folder.

    Raises:
        CheckpointError: It holds safetensors too, so that nobody can say which weights are meant.
    """
    if not (folder / MANIFEST).is_file():
        return False
    if weights := sorted(path.name for path in folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds {MANIFEST}, as Orbax folders do, and {weights}, as Hugging Face folders do; "
            "take away those that are not meant"
        )
    return True


def read_orbax(
    folder: Path,
    config: ModelConfig | DraftHeadConfig,
    shardings: Any = None,
    *,
    allow_nonfinite: bool = False,
) -> Weights:
    """Reads the parameters of an Orbax folder, each in the type that it is stored in.

    Args:
        folder: The folder.
        config: What its ``config.json`` says.
        shardings: Where the parameters go: a `jax.sharding.Sharding` for each, in the structure of the
            weights. Each device reads the chunks that its part lies in. None gives NumPy arrays on the host.
        allow_nonfinite: Whether values may be NaN or infinite.

    Raises:
        ImportError: orbax-checkpoint is not installed.
        CheckpointError: The folder is of another version or kind, is not whole, holds other parameters than
            its config's (all that differ are listed), or values that are not finite, or cannot be read.
    """
    weights = _arrays(folder).restore(_place(folder, config), config, shardings)
    if not allow_nonfinite:
        _check_finite(weights, where=str(folder))
    return weights


def _check_finite(weights: Weights, where: str) -> None:
    """Names the parameters that are not finite; of a mesh's arrays each process looks at its own parts."""
    wrong = []
    for path, value in nnx.traversals.flatten_mapping(weights).items():
        on_mesh = isinstance(value, jax.Array)
        parts = [shard.data for shard in value.addressable_shards] if on_mesh else [value]
        if not all(is_finite(np.asarray(part)) for part in parts):
            wrong.append(".".join(map(str, path)))
    if wrong:
        raise CheckpointError(f"{where}/{WEIGHTS}: values that are not finite, in {wrong}")


def read_orbax_weights(
    folder: Path, config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype, *, allow_nonfinite: bool = False
) -> Weights:
    """The parameters of an Orbax folder on the device, all of one type, as far as `dtype_of` lets them.

    Raises:
        CheckpointError: Values are not finite, and not allowed to be; and what `read_orbax` raises.
    """
    flat = nnx.traversals.flatten_mapping(read_orbax(folder, config, allow_nonfinite=allow_nonfinite))
    weights: Weights = {}
    # One by one, so that only one is there twice.
    for path in list(flat):
        with np.errstate(over="ignore"):  # what overflows is not finite
            value = flat.pop(path).astype(dtype_of(config, path, dtype), copy=False)
        if not (allow_nonfinite or is_finite(value)):
            name = ".".join(map(str, path))
            raise CheckpointError(f"{folder}: {name} holds values that are not finite in {dtype}")
        put(weights, path, jnp.asarray(value))
    return weights


def check_orbax(folder: Path, config: ModelConfig | DraftHeadConfig) -> int:
    """Checks names, shapes and types of the stored parameters; returns the bytes of their files.

    Raises:
        ImportError: As for `read_orbax`.
        CheckpointError: Likewise.
    """
    place = _place(folder, config)
    _arrays(folder).check_stored(place, config)
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def _place(folder: Path, config: ModelConfig | DraftHeadConfig) -> Path:
    """Where the parameters are, once the manifest is known to be one that is read here."""
    path = folder / MANIFEST
    manifest = read_object(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: the format is {manifest.get('format')!r}, not {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {manifest.get('version')!r} of the format, written by jetspec_jax "
            f"{manifest.get('jetspec_jax')}; this is {jetspec_jax.__version__}, which reads version {VERSION}"
        )
    kind = "draft head" if isinstance(config, DraftHeadConfig) else "target"
    if manifest.get("kind") != kind:
        raise CheckpointError(
            f"{path} says that this is a {manifest.get('kind')}, config.json that it is a {kind}"
        )
    place = (folder / WEIGHTS).absolute()
    if not place.is_dir():
        raise CheckpointError(f"{folder} has no {WEIGHTS}/, so it is no whole Orbax folder")
    for stored in place.rglob("*"):
        # Orbax would wait for ever for what comes out of a pipe.
        if not stored.is_dir():
            check_regular(stored)
    return place


def _arrays(folder: Path) -> ModuleType:
    try:
        from jetspec_jax.checkpoint import orbax_arrays
    except ModuleNotFoundError as error:
        raise ImportError(
            f'{folder} is an Orbax folder, which needs orbax-checkpoint: pip install "jetspec-jax[orbax]"'
        ) from error
    return orbax_arrays
