"""Finds checkpoints: targets and draft heads in Hugging Face folders, Orbax folders and GGUF files."""

import functools
import json
import os
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jetspec_jax.checkpoint.content import CheckpointError, check_regular, small_files
from jetspec_jax.checkpoint.gguf.header import is_gguf
from jetspec_jax.checkpoint.hub import local_path, resolve
from jetspec_jax.checkpoint.orbax import MANIFEST, is_orbax, open_orbax
from jetspec_jax.checkpoint.parts import Parameters
from jetspec_jax.checkpoint.reading import open_parameters
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.checkpoint.tensor_plan import ParameterPath, expected_parameters
from jetspec_jax.checkpoint.tokenizer import load_tokenizer, read_eos_token_ids
from jetspec_jax.checkpoint.unread import Unread
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.models.mxfp4 import without_mxfp4

Layout = Literal["huggingface", "orbax", "gguf"]

#: The layouts' names in messages.
LAYOUTS: dict[Layout, str] = {
    "huggingface": "a Hugging Face folder",
    "orbax": "an Orbax folder",
    "gguf": "a GGUF file",
}

#: Files of pickled weights, recognised only for the error message.
PICKLED = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with a valid config; its weights have not been read.

    Attributes:
        folder: The folder, or the GGUF file.
        layout: The layout of the weights.
        raw: The content of ``config.json``, made from the metadata for a GGUF file.
        config: The parsed config.
        allow_nonfinite: Whether weights may be NaN or infinite.
    """

    folder: Path
    layout: Layout
    raw: dict[str, Any]
    config: ModelConfig | DraftHeadConfig
    allow_nonfinite: bool = False

    @property
    def kind(self) -> str:
        """The kind: "target" or "draft head"."""
        return "draft head" if isinstance(self.config, DraftHeadConfig) else "target"

    def opened(self, dtype: np.dtype | None = None) -> dict[ParameterPath, Unread]:
        """The parameters by path; each is read and its values are checked when it is needed, and not kept.

        ``dtype`` is the type of all parameters that `dtype_of` allows to change; None keeps the stored types.
        """
        read = open_orbax if self.layout == "orbax" else open_parameters
        parameters: Parameters = read(self.folder, self.config, dtype, allow_nonfinite=self.allow_nonfinite)
        return {
            parameter.path: Unread(
                parameter.shape,
                parameters.dtypes[parameter.path],
                functools.partial(parameters.read, parameter),
            )
            for parameter in expected_parameters(self.config)
        }


def locate(
    path_or_id: str | Path | Checkpoint,
    *,
    ignore_config_keys: Collection[str] = (),
    allow_nonfinite: bool = False,
) -> Checkpoint:
    """Finds a checkpoint: a folder of either layout, a GGUF file, or a hub id, whose files are fetched.

    The options are those of `Source`. A `Checkpoint` is returned unchanged.

    Raises:
        FileNotFoundError: There is neither such a folder nor such a hub id.
        CheckpointError: The folder has no known layout, or its config is not supported.
    """
    if isinstance(path_or_id, Checkpoint):
        return path_or_id
    folder = local_path(path_or_id)
    if not os.path.isdir(folder):
        folder = resolve(path_or_id)
    layout = _layout(folder)
    source = Source(folder, ignore_config_keys=ignore_config_keys, fp8_activations=False)
    return Checkpoint(folder, layout, source.raw_config, source.config, allow_nonfinite)


def kept_files(folder: Path) -> dict[str, bytes]:
    """The files beside the weights that a conversion keeps, by name: configs and the tokenizer's files."""
    names = {path.relative_to(folder).as_posix(): path for path in small_files(folder)}
    return {
        name: path.read_bytes()
        for name, path in names.items()
        # An index describes the source's weight files only.
        if not name.endswith(".index.json") and name != MANIFEST
    }


def converted_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    """The files that a conversion writes beside the weights, by name.

    They are those of `kept_files`, byte for byte, except that MXFP4 is removed from a ``config.json``,
    because the weights are widened. For a GGUF file they are made from its metadata.
    """
    if checkpoint.layout == "gguf":
        return _files_of_gguf(checkpoint)
    files = kept_files(checkpoint.folder)
    raw = json.loads(files["config.json"])
    if (widened := without_mxfp4(raw)) != raw:
        files["config.json"] = _json(widened)
    return files


def _files_of_gguf(checkpoint: Checkpoint) -> dict[str, bytes]:
    """A GGUF file's config, its tokenizer in transformers' format, and its end-of-sequence tokens."""
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
