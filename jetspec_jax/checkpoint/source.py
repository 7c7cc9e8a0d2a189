"""A checkpoint's location and the options for reading it, as one value."""

import contextlib
import logging
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jetspec_jax.arguments import check_flag, check_type, shown
from jetspec_jax.checkpoint.content import content_of, read_object
from jetspec_jax.checkpoint.gguf.config import read_config
from jetspec_jax.checkpoint.gguf.header import is_gguf, read_header
from jetspec_jax.checkpoint.hub import CONFIG_PATTERNS, resolve
from jetspec_jax.config import (
    DraftHeadConfig,
    ModelConfig,
    parse_config,
    parse_draft_head_config,
    parse_model_config,
)
from jetspec_jax.models import kept_packed, quantization_of, quantized_blocks, with_quantization
from jetspec_jax.progress import log_once
from pallas_kernels.dispatch import fp8_problem

#: The values of `Source.mxfp4`.
AUTO, PACKED, WIDENED = "auto", "packed", "widened"
MXFP4_WORDS = (AUTO, PACKED, WIDENED)
#: The values of `Source.dtype`.
DTYPES = ("auto", "float32", "bfloat16", "float16")
T = TypeVar("T", bound=ModelConfig | DraftHeadConfig)


@dataclass(frozen=True)
class Source:
    """A checkpoint's location and the options for reading it.

    Files are downloaded and the config is parsed once, at first use. Properties that need files raise
    FileNotFoundError if there are none; properties that need the config raise CheckpointError if it is
    invalid.

    Attributes:
        path_or_id: A folder with ``config.json`` and safetensors, an Orbax folder of ``python -m convert``, a
            GGUF file of a target, a hub id such as ``Qwen/Qwen3-8B``, or the name of a pair, whose target is
            meant.
        dtype: The type of the weights, one of `DTYPES` or a type such as ``jnp.bfloat16``;
            "auto" is bfloat16 on a GPU and float32 on a CPU.
        ignore_config_keys: Unknown keys of ``config.json`` to ignore. Keys of a GGUF file are given without
            the architecture's prefix.
        allow_nonfinite: Whether weights may be NaN or infinite. Such weights produce garbage.
        tokenizer: A folder, a GGUF file or a hub id whose tokenizer replaces the checkpoint's.
        chat_template: A text from `read_chat_template` that replaces the tokenizer's template.
        mxfp4: One of `MXFP4_WORDS`: whether a target's experts in MXFP4 stay packed on the devices. "auto" is
            decided by `with_storage`, and is treated as "widened" before.
        fp8_activations: Whether products with weights in FP8 quantise activations too, unless the config
            excludes them. None means yes in 16-bit types, unless the GPU has no FP8 arithmetic, or
            `with_activations` finds that a mesh cuts activations that share a scale.

    Raises:
        TypeError: An attribute has the wrong type.
        ValueError: ``mxfp4`` is not in `MXFP4_WORDS`.
    """

    path_or_id: str | Path
    dtype: Any = "auto"
    ignore_config_keys: Collection[str] = ()
    allow_nonfinite: bool = False
    tokenizer: str | Path | None = None
    chat_template: str | None = None
    mxfp4: str = AUTO
    fp8_activations: bool | None = None

    def __post_init__(self) -> None:
        check_type("mxfp4", self.mxfp4, str, "a string")
        if self.mxfp4 not in MXFP4_WORDS:
            words = f"{', '.join(MXFP4_WORDS[:-1])} or {MXFP4_WORDS[-1]}"
            raise ValueError(f"mxfp4 must be {words}, not {self.mxfp4!r}")
        check_type("fp8_activations", self.fp8_activations, bool | None, "true, false or None")
        check_type("a checkpoint", self.path_or_id, str | os.PathLike, "a folder, a GGUF file or a hub id")
        check_type("tokenizer", self.tokenizer, str | os.PathLike | None, "a folder or a hub id")
        check_type("dtype", _name_of(self.dtype), str, "a string")
        keys = self.ignore_config_keys
        listed = isinstance(keys, Collection) and not isinstance(keys, str | bytes)
        if not listed or not all(isinstance(key, str) for key in keys):
            raise TypeError(f"ignore_config_keys must be a list of strings, not {shown(keys)}")
        check_flag("allow_nonfinite", self.allow_nonfinite)

    @property
    def weights_dtype(self) -> jnp.dtype:
        """`dtype` resolved for this machine, see `resolve_dtype`."""
        return resolve_dtype(self.dtype)

    @cached_property
    def folder(self) -> Path:
        """The local folder with all files, or the GGUF file; a hub id's files are downloaded if needed."""
        return resolve(self.path_or_id)

    @cached_property
    def config_folder(self) -> Path:
        """The local folder with ``config.json``, or the GGUF file; only this file is downloaded."""
        return resolve(self.path_or_id, CONFIG_PATTERNS)

    @property
    def config_path(self) -> Path:
        """The local ``config.json``, or the GGUF file."""
        return self.config_folder if is_gguf(self.config_folder) else self.config_folder / "config.json"

    @cached_property
    def raw_config(self) -> dict[str, Any]:
        """The parsed ``config.json``, or its equivalent from a GGUF file's metadata."""
        if is_gguf(self.config_folder):
            return read_config(read_header(self.config_folder), self.ignore_config_keys)
        return read_object(self.config_path)

    @cached_property
    def config(self) -> ModelConfig | DraftHeadConfig:
        """The config of a target or a draft head."""
        return self._parsed(parse_config)

    @cached_property
    def target_config(self) -> ModelConfig:
        """The config of a target with its weights' format in memory; a head's config raises an error."""
        config = self._parsed(parse_model_config)
        return kept_packed(config) if self.mxfp4 == PACKED else config

    @property
    def partition_config(self) -> ModelConfig:
        """A target's config to check a mesh with, before `with_activations` decides on None by the mesh."""
        return replace(self, fp8_activations=bool(self.fp8_activations)).target_config

    @cached_property
    def head_config(self) -> DraftHeadConfig:
        """The config of a draft head; a target's config raises an error."""
        return self._parsed(parse_draft_head_config)

    def _parsed(self, parse: Callable[..., T]) -> T:
        raw, where = self.raw_config, str(self.config_path)
        with content_of(where):
            config = parse(raw, ignore_config_keys=self.ignore_config_keys, where=where)
            quantized_blocks(config)  # raises if the skipped modules are not supported
        quantization, wanted = quantization_of(config), self.fp8_activations
        if wanted is False:
            return config
        if quantization is None or quantization.is_mxfp4 or quantization.activations == "none":
            if wanted:
                text = f"{where}: no activations are in FP8, so fp8_activations has no effect"
                log_once(logging.WARNING, text)
            return config
        supported = quantization.activations in ("dynamic", "static")
        if wanted is None and (not supported or self.weights_dtype.itemsize != 2 or fp8_problem()):
            return config
        if not supported:
            raise ValueError(
                f"{where}: fp8_activations does not support input_activations of {quantization.activations}"
            )
        return with_quantization(config, replace(quantization, fp8_activations=True))


def resolve_dtype(dtype: Any) -> jnp.dtype:
    """The type of one of `DTYPES`, or of a type such as ``jnp.bfloat16``, on this machine."""
    dtype = _name_of(dtype)
    check_type("dtype", dtype, str, "a name such as bfloat16")
    if dtype == "auto":
        # On CPUs bfloat16 is several times slower than float32.
        dtype = "bfloat16" if jax.default_backend() == "gpu" else "float32"
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be {', '.join(DTYPES[:-1])} or {DTYPES[-1]}, not {dtype!r}")
    return jnp.dtype(dtype)


def _name_of(dtype: Any) -> Any:
    """The name of an array's type; anything else as it is."""
    with contextlib.suppress(TypeError):
        return jnp.dtype(dtype).name if isinstance(dtype, type | jnp.dtype) else dtype
    return dtype
