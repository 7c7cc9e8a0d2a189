"""What a folder is: a Hugging Face checkpoint or an Orbax one, a target's or a draft head's."""

import functools
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jetspec_jax.checkpoint.content import (
    CheckpointError,
    check_regular,
    content_of,
    read_object,
    small_files,
)
from jetspec_jax.checkpoint.hub import local_path, resolve
from jetspec_jax.checkpoint.orbax import MANIFEST, is_orbax, open_orbax
from jetspec_jax.checkpoint.parts import Parameters
from jetspec_jax.checkpoint.reading import open_parameters
from jetspec_jax.checkpoint.tensor_plan import ParameterPath, expected_parameters
from jetspec_jax.checkpoint.unread import Unread
from jetspec_jax.config import DraftHeadConfig, ModelConfig, parse_config
from jetspec_jax.models.mxfp4 import without_mxfp4

Layout = Literal["huggingface", "orbax"]

#: Weights that are read here only to say why they are not.
PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config is known to be valid; its weights are not looked at yet.

    Attributes:
        folder: Where it is.
        layout: How its weights are stored.
        raw: Its ``config.json``.
        config: What that says.
        allow_nonfinite: Whether its weights may be NaN or infinite.
    """

    folder: Path
    layout: Layout
    raw: dict[str, Any]
    config: ModelConfig | DraftHeadConfig
    allow_nonfinite: bool = False

    @property
    def kind(self) -> str:
        """What it is: "target" or "draft head"."""
        return "draft head" if isinstance(self.config, DraftHeadConfig) else "target"

    def opened(self, dtype: np.dtype | None = None) -> dict[ParameterPath, Unread]:
        """The parameters, by their paths: none is read before it is needed, and none is kept.

        Args:
            dtype: The type of all of them, as far as `dtype_of` lets it; None leaves each as it is stored.

        Raises:
            CheckpointError: As for `read_weights` and `read_orbax_weights`; of values, when they are read.
        """
        read = open_orbax if self.layout == "orbax" else open_parameters
        parameters: Parameters = read(self.folder, self.config, dtype, allow_nonfinite=self.allow_nonfinite)
        return {
            own.path: Unread(own.shape, parameters.dtypes[own.path], functools.partial(parameters.read, own))
            for own in expected_parameters(self.config)
        }


def locate(
    path_or_id: str | Path | Checkpoint,
    *,
    ignore_config_keys: Collection[str] = (),
    allow_nonfinite: bool = False,
) -> Checkpoint:
    """Finds a checkpoint: a folder of either layout, or a hub id, whose files are fetched.

    Args:
        path_or_id: The folder or the hub id; what has been found already is returned as it is.
        ignore_config_keys: Unknown keys of ``config.json`` that the caller vouches for.
        allow_nonfinite: Whether weights may be NaN or infinite, which is refused when they are read.

    Raises:
        FileNotFoundError: There is no such folder and no such hub id.
        CheckpointError: The folder is neither layout or both, or its config is not a supported one.
    """
    if isinstance(path_or_id, Checkpoint):
        return path_or_id
    folder = local_path(path_or_id)
    if not os.path.isdir(folder):
        folder = resolve(path_or_id)
    layout = _layout(folder)
    path = folder / "config.json"
    raw = read_object(path)
    with content_of(path):
        config = parse_config(raw, ignore_config_keys=ignore_config_keys, where=str(path))
    return Checkpoint(folder, layout, raw, config, allow_nonfinite)


def kept_files(folder: Path) -> dict[str, bytes]:
    """The files beside the weights that a conversion keeps, by name: configs and what the tokenizer needs."""
    names = {path.relative_to(folder).as_posix(): path for path in small_files(folder)}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        # An index belongs to the weights as they were stored.
        if not name.endswith(".index.json") and name != MANIFEST
    }


def converted_files(folder: Path) -> dict[str, bytes]:
    """What becomes of `kept_files`: the same bytes, but for a ``config.json`` of weights in MXFP4.

    They are widened, so that has to go from it.
    """
    files = kept_files(folder)
    raw = json.loads(files["config.json"])
    if (widened := without_mxfp4(raw)) != raw:
        files["config.json"] = (json.dumps(widened, indent=2) + "\n").encode()
    return files


def _layout(folder: Path) -> Layout:
    check_regular(folder / "config.json")
    check_regular(folder / MANIFEST)
    has_config = (folder / "config.json").is_file()
    weights = [path.name for pattern in ("*.safetensors", *PICKLED) for path in folder.glob(pattern)]
    if is_orbax(folder) and has_config:
        return "orbax"
    if has_config and weights:
        return "huggingface"
    found = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(found[:8]) + (", ..." if len(found) > 8 else "")
    raise CheckpointError(
        f"{folder} is no checkpoint: a Hugging Face folder holds config.json and *.safetensors, an Orbax "
        f"folder config.json, {MANIFEST} and weights/; this one holds {shown or 'nothing'}"
    )
