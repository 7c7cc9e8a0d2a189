"""Where a checkpoint's files are: a local folder, or the Hugging Face hub, from which they are fetched."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax.checkpoint.content import SMALL_PATTERNS, check_regular
from jetspec_jax.checkpoint.gguf.header import is_gguf
from jetspec_jax.checkpoint.pairs import pair_of
from jetspec_jax.checkpoint.reading import Headers, has_weights, merge_shards, read_headers
from jetspec_jax.checkpoint.tensor_plan import Stored
from jetspec_jax.progress import waiting

# What a hub download fetches: never pickles, never code.
HUB_PATTERNS = (*SMALL_PATTERNS, "*.safetensors")
CONFIG_PATTERNS = ("config.json",)
# Weights in folders of their own are the same again in other layouts, as large: GPT-OSS's "original".
OTHER_LAYOUTS = ("*/*.safetensors",)


def resolve(path_or_id: str | Path, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """The local folder or GGUF file of a checkpoint; a hub id's files are downloaded, or found in its cache.

    Args:
        path_or_id: A folder, a GGUF file, a hub id, or the name of a pair in `PAIRS`: its target.
        patterns: Which files of a hub id to fetch.

    Raises:
        FileNotFoundError: Neither a folder with a ``config.json``, nor a GGUF file, nor a hub id that can be
            fetched.
        CheckpointError: The ``config.json`` is no file.
    """
    if (pair := pair_of(path_or_id)) is not None:
        return pair.find_target()
    folder = local_path(path_or_id)
    if os.path.isdir(folder):  # a name that no file can have is no folder, where Path.is_dir may raise
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
        raise FileNotFoundError(f"{path_or_id} is neither a folder nor a hub id (owner/name)")
    import huggingface_hub

    with _asking_the_hub(path_or_id):
        return Path(
            huggingface_hub.snapshot_download(
                str(path_or_id), allow_patterns=list(patterns), ignore_patterns=list(OTHER_LAYOUTS)
            )
        )


def local_path(path_or_id: str | Path) -> Path:
    """The path that a user's word is if it is one; "~" is the home of those who have one."""
    return Path(os.path.expanduser(path_or_id))


def find_headers(path_or_id: str | Path, folder: Path) -> Headers:
    """What the headers of a checkpoint's files say; where the files are not here, only headers are fetched.

    Args:
        path_or_id: A folder or a hub id.
        folder: Where `resolve` has found its config.

    Raises:
        FileNotFoundError: There are no weights, or the hub cannot be reached.
        CheckpointError: A file is corrupt; or the weights are pickled.
    """
    if is_gguf(folder) or folder == local_path(path_or_id) or has_weights(folder):
        return read_headers(folder)
    import huggingface_hub

    with _asking_the_hub(path_or_id):
        found = huggingface_hub.get_safetensors_metadata(str(path_or_id))
        about = huggingface_hub.model_info(str(path_or_id), files_metadata=True)
        sizes: dict[str, Any] = {file.rfilename: file.size for file in about.siblings or ()}
        file_bytes = sum(sizes[name] for name in found.files_metadata)
    shards = [
        {name: Stored(tuple(own.shape), own.dtype) for name, own in file.tensors.items()}
        for file in found.files_metadata.values()
    ]
    tensors, wrong = merge_shards(shards, found.weight_map)
    return Headers(str(path_or_id), tensors, wrong, file_bytes)


@contextlib.contextmanager
def _asking_the_hub(path_or_id: str | Path) -> Iterator[None]:
    """Says what could not be had, whatever the hub's client raises."""
    try:
        with waiting(f"asking the Hugging Face hub for {path_or_id}"):
            yield
    except Exception as error:  # the client lets its HTTP library's errors through as they come
        raise FileNotFoundError(
            f"{path_or_id} is no local folder, is not in the hub's local cache, and cannot be fetched from "
            f"the Hugging Face hub: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error
