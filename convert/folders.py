"""What a checkpoint is: a Hugging Face folder, an Orbax one or a GGUF file; a target's or a draft head's."""

import functools
import json
import os
import tempfile
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
from jetspec_jax.checkpoint.gguf.config import read_config
from jetspec_jax.checkpoint.gguf.header import is_gguf, read_header
from jetspec_jax.checkpoint.hub import local_path, resolve
from jetspec_jax.checkpoint.orbax import MANIFEST, is_orbax, open_orbax
from jetspec_jax.checkpoint.parts import Parameters
from jetspec_jax.checkpoint.reading import open_parameters
from jetspec_jax.checkpoint.tensor_plan import ParameterPath, expected_parameters
from jetspec_jax.checkpoint.tokenizer import load_tokenizer, read_eos_token_ids
from jetspec_jax.checkpoint.unread import Unread
from jetspec_jax.config import DraftHeadConfig, ModelConfig, parse_config
from jetspec_jax.models.mxfp4 import without_mxfp4

Layout = Literal["huggingface", "orbax", "gguf"]

#: What people call the layouts.
LAYOUTS: dict[Layout, str] = {
    "huggingface": "a Hugging Face folder",
    "orbax": "an Orbax folder",
    "gguf": "a GGUF file",
}

#: Weights that are read here only to say why they are not.
PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose config is known to be valid; its weights are not looked at yet.

    Attributes:
        folder: Where it is: a folder, or a GGUF file.
        layout: How its weights are stored.
        raw: Its ``config.json``, or what the metadata of a GGUF file make one hold.
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
    """Finds a checkpoint: a folder of either layout, a GGUF file, or a hub id, whose files are fetched.

    Args:
        path_or_id: The folder, the file or the hub id; what has been found already is returned as it is.
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
    path = folder if layout == "gguf" else folder / "config.json"
    raw = read_config(read_header(folder), ignore_config_keys) if layout == "gguf" else read_object(path)
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


def converted_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files that a conversion writes beside the weights, by name.

    They are those of `kept_files`, byte for byte, but for a ``config.json`` of weights in MXFP4: they are
    widened, so that has to go from it. Of a GGUF file they are made of its metadata.
    """
    if checkpoint.layout == "gguf":
        return _files_of_gguf(checkpoint)
    files = kept_files(checkpoint.folder)
    raw = json.loads(files["config.json"])
    if (widened := without_mxfp4(raw)) != raw:
        files["config.json"] = _json(widened)
    return files


def _files_of_gguf(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The config of a GGUF file, its tokenizer as transformers saves it, and the tokens that end a text."""
    tokenizer, vocab_size = load_tokenizer(checkpoint.folder), checkpoint.raw["vocab_size"]
    ends = {"eos_token_id": list(read_eos_token_ids(checkpoint.folder, tokenizer, vocab_size))}
    files = {"config.json": _json(checkpoint.raw), "generation_config.json": _json(ends)}
    if tokenizer is not None:
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            files |= kept_files(Path(folder))
    return files


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _layout(folder: Path) -> Layout:
    if is_gguf(folder):
        return "gguf"
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
