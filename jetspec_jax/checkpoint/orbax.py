"""Reads Orbax folders, which ``python -m convert`` writes.

They have a ``config.json`` and the tokenizer's files like Hugging Face folders, and instead of safetensors
the parameters in this library's structure. Orbax is imported only when such a folder is read.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jetspec_jax.checkpoint.content import (
    CheckpointError,
    check_regular,
    check_small,
    content_of,
    read_object,
)
from jetspec_jax.checkpoint.finite import is_finite
from jetspec_jax.checkpoint.parts import Placement, part_of, take_rows, to_devices
from jetspec_jax.checkpoint.tensor_plan import Parameter, ParameterPath, expected_parameters
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models import Weights, dtype_of
from jetspec_jax.models.key_table import ShardRows
from jetspec_jax.models.scale_key import check_fp8_scales
from jetspec_jax.version import __version__

#: The file that marks an Orbax folder, with its format, version and kind.
MANIFEST = "orbax.json"
FORMAT = "jetspec-jax orbax"
VERSION = 1
#: The subfolder of the parameters.
WEIGHTS = "weights"


def is_orbax(folder: Path) -> bool:
    """Whether a folder is an Orbax folder; refuses a folder that also has safetensors."""
    if not (folder / MANIFEST).is_file():
        return False
    if weights := sorted(path.name for path in folder.glob("*.safetensors")):
        raise CheckpointError(
            f"{folder} holds {MANIFEST}, as Orbax folders do, and {weights}, as Hugging Face folders do; "
            "remove the files of one of the two formats"
        )
    return True


def read_orbax_weights(
    folder: Path,
    config: ModelConfig | DraftHeadConfig,
    dtype: jnp.dtype | None = None,
    mesh: Mesh | None = None,
    *,
    allow_nonfinite: bool = False,
) -> Weights:
    """Reads the parameters of an Orbax folder onto devices.

    A process reads only the chunks of its devices' shards; parameters with KV heads that the mesh repeats are
    read whole, one at a time. ``dtype`` is as for `read_weights`.

    Raises:
        ImportError: orbax-checkpoint is not installed.
        CheckpointError: The folder is of another version or kind, is incomplete, has other parameters than
            its config (all differences are listed), has values that are not finite or scales of FP8 weights
            that `check_fp8_scales` refuses, or cannot be read.
    """
    placement = None if mesh is None else Placement(config, mesh)
    return to_devices(open_orbax(folder, config, dtype, allow_nonfinite=allow_nonfinite), placement)


def open_orbax(
    folder: Path,
    config: ModelConfig | DraftHeadConfig,
    dtype: jnp.dtype | None = None,
    *,
    allow_nonfinite: bool = False,
) -> "OrbaxParameters":
    """Opens the parameters of an Orbax folder for reading in any order; everything but values is checked."""
    arrays = _arrays(folder).open_arrays(_place(folder, config), config)
    dtypes = {
        path: array.dtype if dtype is None else dtype_of(config, path, dtype)
        for path, array in arrays.items()
    }
    products = jnp.dtype(jnp.float32) if dtype is None else dtype
    return OrbaxParameters(folder, expected_parameters(config), arrays, dtypes, products, allow_nonfinite)


@dataclass(frozen=True)
class OrbaxParameters:
    """The parameters of an Orbax folder: see `Parameters`.

    Products have quantised weights in the type ``products``.
    """

    folder: Path
    parameters: Sequence[Parameter]
    arrays: Mapping[ParameterPath, Any]
    dtypes: Mapping[ParameterPath, np.dtype]
    products: np.dtype
    allow_nonfinite: bool

    def read(
        self, parameter: Parameter, rows: ShardRows | None = None, shape: tuple[int, ...] | None = None
    ) -> np.ndarray:
        """A parameter, or a device's shard of it; see `Parameters`."""
        if rows is None or shape is None:
            stored = self.arrays[parameter.path][...]
        elif max(rows.repeats, default=1) == 1 and not parameter.block:
            stored = take_rows(self.arrays[parameter.path], rows.rows)
        else:
            stored = part_of(parameter, self._whole(parameter.path), rows, shape)
        dtype = self.dtypes[parameter.path]
        with np.errstate(over="ignore", invalid="ignore"):  # values that overflow are reported as not finite
            value = stored.astype(dtype, copy=False)
        if not (self.allow_nonfinite or is_finite(value)):
            rounded = f" in {dtype}" if is_finite(stored) else ""
            raise CheckpointError(
                f"{self.folder}: {parameter.name} holds values that are not finite{rounded}"
            )
        if parameter.block:
            with content_of(f"{self.folder}: {parameter.name}"):
                check_fp8_scales(value, self.products, allow_nonfinite=self.allow_nonfinite)
        return value

    @functools.cached_property
    def _whole(self) -> Callable[[ParameterPath], np.ndarray]:
        """Reads a whole array and keeps the last one, so that all its shards need one read."""
        return functools.lru_cache(maxsize=1)(lambda path: self.arrays[path][...])


def check_orbax(folder: Path, config: ModelConfig | DraftHeadConfig) -> int:
    """Checks names, shapes and types of the stored parameters; returns the size of their files in bytes."""
    place = _place(folder, config)
    _arrays(folder).open_arrays(place, config)
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def _place(folder: Path, config: ModelConfig | DraftHeadConfig) -> Path:
    """The folder of the parameters, after checking the manifest and the files."""
    path = folder / MANIFEST
    manifest = read_object(path)
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: the format is {manifest.get('format')!r}, not {FORMAT!r}")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: version {manifest.get('version')!r} of the format, written by jetspec_jax "
            f"{manifest.get('jetspec_jax')}; this is {__version__}, which reads version {VERSION}"
        )
    kind = "draft head" if isinstance(config, DraftHeadConfig) else "target"
    if manifest.get("kind") != kind:
        raise CheckpointError(
            f"{path} says that this is a {manifest.get('kind')}, config.json that it is a {kind}"
        )
    place = (folder / WEIGHTS).absolute()
    if not place.is_dir():
        raise CheckpointError(f"{folder} has no {WEIGHTS}/, so it is not a complete Orbax folder")
    for stored in place.rglob("*"):
        # Orbax would block on a pipe. It reads all files whole except those of arrays, which are in folders
        # called "d".
        if not stored.is_dir():
            (check_regular if stored.parent.name == "d" else check_small)(stored)
    return place


def _arrays(folder: Path) -> ModuleType:
    try:
        from jetspec_jax.checkpoint import orbax_arrays
    except ModuleNotFoundError as error:
        raise ImportError(
            f'{folder} is an Orbax folder, which needs orbax-checkpoint: pip install "jetspec-jax[orbax]"'
        ) from error
    return orbax_arrays
