"""Checkpoints: a target or a draft head from a local folder or the Hugging Face hub."""

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.checkpoint.safetensors_io import (
    Headers,
    has_weights,
    merge_shards,
    read_headers,
    read_weights,
)
from jetspec_jax.checkpoint.tensor_plan import Stored
from jetspec_jax.config import (
    DraftHeadConfig,
    ModelConfig,
    check_head_fits,
    parse_draft_head_config,
    parse_model_config,
    read_eos_token_ids,
    read_json,
)
from jetspec_jax.device.keeper import Keeper
from jetspec_jax.device.memory import HEAD_WEIGHTS, TARGET_WEIGHTS, check_memory, weight_bytes
from jetspec_jax.models import Weights

# What a hub download fetches: never pickles, never code.
HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.jinja", "*.model")
CONFIG_PATTERNS = ("config.json",)
# Weights in folders of their own are the same again in other layouts, as large: GPT-OSS's "original".
OTHER_LAYOUTS = ("*/*.safetensors",)


@dataclass(frozen=True, eq=False)
class Target:
    """A target ready to decode with.

    Attributes:
        config: Its geometry.
        weights: Its parameters, a plain pytree.
        eos_token_ids: Tokens that end a sequence.
        tokenizer: A transformers tokenizer, or None when the checkpoint has none.
        keeper: The engine that decoded last, for the next call; it is freed with the target.
    """

    config: ModelConfig
    weights: Weights
    eos_token_ids: tuple[int, ...] = ()
    tokenizer: Any = None
    keeper: Keeper = field(default_factory=Keeper, init=False, repr=False)

    @property
    def dtype(self) -> jnp.dtype:
        """Of the weights."""
        return self.weights["embed_tokens"].dtype


@dataclass(frozen=True, eq=False)
class Head:
    """A draft head ready to draft for a target.

    Attributes:
        config: Its geometry.
        weights: Its parameters, a plain pytree.
    """

    config: DraftHeadConfig
    weights: Weights


def load_target(
    path_or_id: str | Path, *, dtype: str = "auto", ignore_config_keys: Collection[str] = ()
) -> Target:
    """Loads a target from a local folder or from the Hugging Face hub.

    Args:
        path_or_id: A folder with ``config.json`` and safetensors, or a hub id such as ``Qwen/Qwen3-8B``.
        dtype: "float32", "bfloat16", or "auto": bfloat16 on a GPU, float32 on a CPU.
        ignore_config_keys: Unknown keys of ``config.json`` that the caller vouches for.

    Raises:
        FileNotFoundError: There is no such folder, or the hub cannot be reached.
        ValueError: The config or the tensors are not what a supported family has; all problems are listed.
        DeviceMemoryError: The device cannot hold the weights.
    """
    config = read_target_config(path_or_id, ignore_config_keys=ignore_config_keys)
    resolved = resolve_dtype(dtype)
    check_memory(lambda: {TARGET_WEIGHTS: weight_bytes(config, resolved)})
    folder = resolve(path_or_id)
    eos = read_eos_token_ids(folder)
    if beyond := [token for token in eos if token >= config.vocab_size]:
        raise ValueError(
            f"{folder}: eos_token_id {beyond} lies outside the vocabulary of {config.vocab_size}"
        )
    weights = read_weights(folder, config, resolved)
    return Target(config, weights, eos, load_tokenizer(folder))


def load_draft_head(
    path_or_id: str | Path,
    *,
    dtype: str = "auto",
    target: Target | None = None,
    ignore_config_keys: Collection[str] = (),
) -> Head:
    """Loads a draft head from a local folder or from the Hugging Face hub.

    Args:
        path_or_id: A folder or a hub id such as ``JetSpec/jetspec-qwen3-8b``.
        dtype: As for `load_target`.
        target: When given, a head that does not fit it is refused before its weights are read.
        ignore_config_keys: Unknown keys of ``config.json`` that the caller vouches for.

    Raises:
        FileNotFoundError: There is no such folder, or the hub cannot be reached.
        ValueError: The config or the tensors are not those of a supported head, or it does not fit.
        DeviceMemoryError: The device cannot hold the weights.
    """
    config = read_draft_head_config(path_or_id, ignore_config_keys=ignore_config_keys)
    if target is not None:
        check_head_fits(config, target.config)
    resolved = resolve_dtype(dtype)
    check_memory(lambda: {HEAD_WEIGHTS: weight_bytes(config, resolved)})
    return Head(config, read_weights(resolve(path_or_id), config, resolved))


def read_target_config(path_or_id: str | Path, *, ignore_config_keys: Collection[str] = ()) -> ModelConfig:
    """The config of a target; of a hub id, nothing else is fetched.

    Raises:
        FileNotFoundError: It is not to be had.
        ValueError: It is not that of a supported family.
    """
    path = resolve(path_or_id, CONFIG_PATTERNS) / "config.json"
    return parse_model_config(read_json(path), ignore_config_keys=ignore_config_keys, where=str(path))


def read_draft_head_config(
    path_or_id: str | Path, *, ignore_config_keys: Collection[str] = ()
) -> DraftHeadConfig:
    """The config of a draft head; of a hub id, nothing else is fetched.

    Raises:
        FileNotFoundError: It is not to be had.
        ValueError: It is not that of a supported head.
    """
    path = resolve(path_or_id, CONFIG_PATTERNS) / "config.json"
    return parse_draft_head_config(read_json(path), ignore_config_keys=ignore_config_keys, where=str(path))


def resolve(path_or_id: str | Path, patterns: Sequence[str] = HUB_PATTERNS) -> Path:
    """The local folder of a checkpoint; a hub id's files are downloaded, or found in the hub's cache.

    Args:
        path_or_id: A folder or a hub id.
        patterns: Which files of a hub id to fetch.

    Raises:
        FileNotFoundError: Neither a folder with a ``config.json`` nor a hub id that can be fetched.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"{folder} has no config.json, so it is no checkpoint")
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


def find_headers(path_or_id: str | Path, folder: Path) -> Headers:
    """What the headers of a checkpoint's files say; where the files are not here, only headers are fetched.

    Args:
        path_or_id: A folder or a hub id.
        folder: Where `resolve` has found its config.

    Raises:
        FileNotFoundError: There are no weights, or the hub cannot be reached.
        ValueError: A file is corrupt; or the weights are pickled.
    """
    if folder == Path(path_or_id).expanduser() or has_weights(folder):
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
        yield
    except Exception as error:  # the client lets its HTTP library's errors through as they come
        raise FileNotFoundError(
            f"{path_or_id} is no local folder, is not in the hub's local cache, and cannot be fetched from "
            f"the Hugging Face hub: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        ) from error


def resolve_dtype(dtype: str) -> jnp.dtype:
    """The dtype that a user's word stands for.

    Raises:
        ValueError: The word is none of "auto", "float32", "bfloat16".
    """
    if dtype == "auto":
        # On CPUs bf16 is several times slower than float32.
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype must be auto, float32 or bfloat16, not {dtype!r}")
    return jnp.dtype(dtype)


def load_tokenizer(folder: Path) -> Any:
    """The folder's transformers tokenizer, or None when it has none.

    Raises:
        ValueError: It is one in Python only, which cannot decode token by token.
    """
    if not (folder / "tokenizer.json").exists() and not (folder / "tokenizer_config.json").exists():
        return None
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ValueError(f"{folder}: {type(tokenizer).__name__} has no fast form; a tokenizer.json is needed")
    return tokenizer
