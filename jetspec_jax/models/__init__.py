"""Flax models: shared blocks, the transformer skeleton, one file per family, and the draft head.

Models are defined and trained as NNX modules. Across ``jit`` their parameters travel as plain nested dicts of
arrays, and a program binds them to a module again while it is traced (`bind`): passing modules through
``nnx.jit`` would cost milliseconds at every call.
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.config.quantization import PACKED, Quantization
from jetspec_jax.models.draft_head import DraftHead
from jetspec_jax.models.gemma3 import Gemma3
from jetspec_jax.models.gemma4 import Gemma4
from jetspec_jax.models.gpt_oss import GptOss
from jetspec_jax.models.llama import Llama
from jetspec_jax.models.quantized import VALUES, Path, blocks_of, is_quantized, quantize
from jetspec_jax.models.qwen3 import Qwen3
from jetspec_jax.models.qwen3_5 import Qwen3_5
from jetspec_jax.models.qwen3_moe import Qwen3MoE
from jetspec_jax.models.qwen3_next import Qwen3Next
from jetspec_jax.models.step import Step
from jetspec_jax.models.transformer import Transformer
from pallas_kernels.quantized import FP8

FAMILIES: dict[str, type[Transformer]] = {
    "llama": Llama,
    "mistral": Llama,
    "qwen2": Llama,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3MoE,
    "gemma3_text": Gemma3,
    "gemma4_text": Gemma4,
    "gpt_oss": GptOss,
    "step3p5": Step,
    "qwen3_5_text": Qwen3_5,
    "qwen3_5_moe_text": Qwen3_5,
    "qwen3_next": Qwen3Next,
}

#: Nested dicts (and integer-keyed dicts for layers) of arrays: a module's parameters.
Weights = dict[str, Any]


def build(
    config: ModelConfig | DraftHeadConfig,
    *,
    rngs: nnx.Rngs,
    dtype: jnp.dtype = jnp.dtype(jnp.float32),
) -> Transformer | DraftHead:
    """A randomly initialised module with parameters of type ``dtype``, as far as `dtype_of` lets it."""
    module = _build(config, rngs, dtype)
    quantize(module, quantized_blocks(config), quantization_of(config))
    return module


def abstract(
    config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype = jnp.dtype(jnp.float32)
) -> Transformer | DraftHead:
    """The module of a config with shapes in place of arrays; parameters still name their axes."""
    module = nnx.eval_shape(lambda: _build(config, _OneKey(0), dtype))
    quantize(module, quantized_blocks(config), quantization_of(config))
    return module


def quantization_of(config: ModelConfig | DraftHeadConfig) -> Quantization | None:
    """How a config's weights are quantised, if they are."""
    return (config.layers if isinstance(config, DraftHeadConfig) else config).quantization


@functools.cache
def quantized_blocks(config: ModelConfig | DraftHeadConfig) -> Mapping[Path, tuple[int, ...]]:
    """Which of a config's parameters are quantised; see `blocks_of`.

    Raises:
        ValueError: As for that; or some of a draft head's layers are quantised and others not: their
            projections of the context are one product.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return {}
    blocks = blocks_of(abstract(without_quantization(config)), quantization)
    if isinstance(config, DraftHeadConfig):
        count = sum(path[-1] == "qkv_proj" for path in blocks)
        if 0 < count < (layers := config.layers.num_layers):
            raise ValueError(
                f"quantization_config leaves out queries, keys and values of {layers - count} of the draft "
                "head's layers; those of all layers must be quantised, or none"
            )
    return blocks


def kept_packed(config: ModelConfig) -> ModelConfig:
    """The config of the same model with its experts kept in MXFP4, as a file packs them."""
    return replace(config, quantization=PACKED)


def without_quantization(config: ModelConfig | DraftHeadConfig) -> ModelConfig | DraftHeadConfig:
    """The config of the same model with no weights quantised."""
    if isinstance(config, DraftHeadConfig):
        return replace(config, layers=replace(config.layers, quantization=None))
    return replace(config, quantization=None)


def _build(
    config: ModelConfig | DraftHeadConfig, rngs: nnx.Rngs, dtype: jnp.dtype
) -> Transformer | DraftHead:
    """The module with none of its parameters quantised."""
    if isinstance(config, DraftHeadConfig):
        return DraftHead(config, rngs=rngs, dtype=dtype)
    return FAMILIES[config.model_type](config, rngs=rngs, dtype=dtype)


def dtype_of(
    config: ModelConfig | DraftHeadConfig, path: tuple[str | int, ...], dtype: jnp.dtype
) -> jnp.dtype:
    """The type that a parameter has, by its path in the weights, where all of them are to have one.

    What is quantised stays so: its values are FP8, and its scales float32; or both are bytes of MXFP4.
    """
    if is_quantized(path):
        own = quantization_of(config)
        if own is not None and own.is_mxfp4:
            return jnp.dtype(jnp.uint8)
        return FP8 if path[-1] == VALUES else jnp.dtype(jnp.float32)
    family = DraftHead if isinstance(config, DraftHeadConfig) else FAMILIES[config.model_type]
    name = ".".join("{}" if isinstance(part, int) else part for part in path)
    return jnp.dtype(jnp.float32) if name in family.FLOAT32 else dtype


class _OneKey(nnx.Rngs):
    """Gives one key again and again: shapes need no other, and to count keys in a trace is slow."""

    def __init__(self, seed: int):
        """Makes the key."""
        super().__init__(seed)
        self._key = nnx.Variable(jax.random.key(seed))

    def params(self) -> jax.Array:
        """The key."""
        return self._key[...]


def weights_of(module: nnx.Module) -> Weights:
    """A module's parameters as a plain pytree."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@overload
def bind(config: ModelConfig, weights: Weights) -> Transformer: ...
@overload
def bind(config: DraftHeadConfig, weights: Weights) -> DraftHead: ...
def bind(config, weights):
    """The module of a config over given parameters: inside a traced program this costs nothing."""
    graph, state = nnx.split(abstract(config))
    nnx.replace_by_pure_dict(state, weights)
    return nnx.merge(graph, state)
