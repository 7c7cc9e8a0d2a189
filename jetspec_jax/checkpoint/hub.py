"""Finds a checkpoint's files in a local folder or downloads them from the Hugging Face hub."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.content import SMALL_PATTERNS, check_regular
from jetspec_jax.checkpoint.gguf.header import is_gguf
from jetspec_jax.checkpoint.pairs import PAIR_NAMES, pair_of
from jetspec_jax.checkpoint.reading import Headers, has_weights, merge_shards, read_headers
from jetspec_jax.checkpoint.tensor_plan import Stored
from jetspec_jax.progress import waiting

# Files that are downloaded: never pickles, never code.
HUB_PATTERNS = (*SMALL_PATTERNS, "*.safetensors")
CONFIG_PATTERNS = ("config.json",)
# Weights in subfolders are copies of the same size in other layouts, such as GPT-OSS's "original".
OTHER_LAYOUTS = ("*/*.safetensors",)


def resolve(path_or_id: str | Path, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """The local folder or GGUF file of a checkpoint; for a hub id, downloads the files that are not cached.

    The name of a pair in `PAIRS` means its target. ``patterns`` are the files to download.
    """
    if (pair := pair_of(path_or_id)) is not None:
        return pair.find_target()
    folder = local_path(path_or_id)
    if os.path.isdir(folder):  # false for invalid names, for which Path.is_dir may raise
        check_regular(folder / "config.json")
        if not (folder / "config.json").is_file():
            if files := sorted(path.name for path in folder.glob("*.gguf")):
                raise FileNotFoundError(
                    f"{folder} is a folder; name one of its GGUF files: {', '.join(files)}"
                )
            raise FileNotFoundError(f"{folder} has no config.json, so it is no checkpoint")
        return folder
    if is_gguf(folder):
        if not os.path.exists(folder):
            raise FileNotFoundError(f"{folder}: there is no such file")
        return folder
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(path_or_id)):
        raise FileNotFoundError(
            f"{path_or_id} is neither a folder nor a hub id (owner/name) nor a pair's name ({PAIR_NAMES})"
        )
    import huggingface_hub

    with _asking_the_hub(path_or_id):
        return Path(
            huggingface_hub.snapshot_download(
                str(path_or_id), allow_patterns=list(patterns), ignore_patterns=list(OTHER_LAYOUTS)
            )
        )


def local_path(path_or_id: str | Path) -> Path:
    """The argument as a path, with "~" expanded."""
    return Path(os.path.expanduser(path_or_id))


def find_headers(path_or_id: str | Path, folder: Path) -> Headers:
    """The headers of a checkpoint's files; if the files are not local, only their headers are fetched."""
    if is_gguf(folder) or folder == local_path(path_or_id) or has_weights(folder):
        return read_headers(folder)
    import huggingface_hub

    with _asking_the_hub(path_or_id):
        found = huggingface_hub.get_safetensors_metadata(str(path_or_id))
        about = huggingface_hub.model_info(str(path_or_id), files_metadata=True)
        sizes: dict[str, Any] = {file.rfilename: file.size for file in about.siblings or ()}
        file_bytes = sum(sizes[name] for name in found.files_metadata)
    shards = [
        {name: Stored(tuple(tensor.shape), tensor.dtype) for name, tensor in file.tensors.items()}
        for file in found.files_metadata.values()
    ]
    tensors, wrong = merge_shards(shards, found.weight_map)
    return Headers(str(path_or_id), tensors, wrong, file_bytes)


@contextlib.contextmanager
def _asking_the_hub(path_or_id: str | Path) -> Iterator[None]:
    """Converts any error of the hub's client into a FileNotFoundError that names the checkpoint."""
    try:
        with waiting(f"asking the Hugging Face hub for {path_or_id}"):
            yield
    except Exception as error:  # the client also raises the errors of its HTTP library
        raise FileNotFoundError(
            f"{path_or_id} is no local folder, is not in the hub's local cache, and cannot be fetched from "
            f"the Hugging Face hub: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
