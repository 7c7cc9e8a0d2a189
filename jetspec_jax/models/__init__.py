"""Flax models: shared blocks, the transformer skeleton, one file per family, and the draft head.

Models are defined and trained as NNX modules. Jitted functions take their parameters as plain nested dicts of
arrays and bind them to a module during tracing (`bind`): passing modules through ``nnx.jit`` would cost
milliseconds per call.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
from flax import nnx

from jetspec_jax.arguments import check_type, is_redefinition, shown
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.config.quantization import PACKED, Quantization
from jetspec_jax.config.target import READERS, WRAPPERS, Read
from jetspec_jax.models.draft_head import DraftHead
from jetspec_jax.models.gemma3 import Gemma3
from jetspec_jax.models.gemma4 import Gemma4
from jetspec_jax.models.gpt_oss import GptOss
from jetspec_jax.models.key_table import ParameterPath, key_path
from jetspec_jax.models.llama import Llama
from jetspec_jax.models.quantized import VALUES, blocks_of, is_quantized, quantize
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

Config = TypeVar("Config", bound=ModelConfig | DraftHeadConfig)

_BUILT_IN = frozenset((*FAMILIES, *WRAPPERS))

#: Nested dicts (and integer-keyed dicts for layers) of arrays: a module's parameters.
Weights = dict[str, Any]


def register_family(model_type: str, *, read: Read, module: type[Transformer]) -> None:
    """Adds a family of targets, whose checkpoints can then be loaded.

    A class outside this package takes the place of an earlier one of the same module and qualified name, so
    that a cell of a notebook can run again. Loaded targets keep the earlier class.

    Args:
        model_type: The ``model_type`` of the family's ``config.json``.
        read: Makes the config of a `Fields`, the object of a ``config.json``; a key that it does not read is
            an error. Its ``model_type`` is replaced.
        module: A subclass of `Transformer` with the family's key table.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The model type is taken.
    """
    check_type("model_type", model_type, str, "a text")
    check_type("read", read, Callable, "a function of Fields")
    if not (isinstance(module, type) and issubclass(module, Transformer)):
        raise TypeError(f"module must be a subclass of Transformer, not {shown(module)}")
    known = FAMILIES.get(model_type, module)
    if model_type in _BUILT_IN or (known is not module and not is_redefinition(known, module)):
        taken = ", ".join((*FAMILIES, *WRAPPERS))
        raise ValueError(f"model_type {model_type!r} is taken; choose another name than {taken}")
    FAMILIES[model_type] = module
    READERS[model_type] = lambda fields: replace(read(fields), model_type=model_type, module=module)


def family_of(config: ModelConfig) -> type[Transformer]:
    """The class of a config's family."""
    return config.module or FAMILIES[config.model_type]


def build(
    config: ModelConfig | DraftHeadConfig,
    *,
    rngs: nnx.Rngs,
    dtype: jnp.dtype = jnp.dtype(jnp.float32),
) -> Transformer | DraftHead:
    """A randomly initialised module with parameters of type ``dtype``, with the exceptions of `dtype_of`."""
    module = _build(config, rngs, dtype)
    quantize(module, quantized_blocks(config), quantization_of(config))
    return module


def abstract(
    config: ModelConfig | DraftHeadConfig, dtype: jnp.dtype = jnp.dtype(jnp.float32)
) -> Transformer | DraftHead:
    """The module of a config with shapes in place of arrays; parameters keep the names of their axes."""
    module = nnx.eval_shape(lambda: _build(config, _OneKey(), dtype))
    quantize(module, quantized_blocks(config), quantization_of(config))
    return module


def quantization_of(config: ModelConfig | DraftHeadConfig) -> Quantization | None:
    """The quantisation of a config's weights; None if they are not quantised."""
    return (config.layers if isinstance(config, DraftHeadConfig) else config).quantization


@functools.cache
def quantized_blocks(config: ModelConfig | DraftHeadConfig) -> Mapping[ParameterPath, tuple[int, ...]]:
    """The quantised parameters of a config and their blocks; see `blocks_of`.

    Layers of a draft head must be quantised alike, because their projections of the context are one product.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return {}
    blocks = blocks_of(abstract(with_quantization(config, None)), quantization)
    if isinstance(config, DraftHeadConfig):
        count = sum(path[-1] == "qkv_proj" for path in blocks)
        if 0 < count < (layers := config.layers.num_layers):
            raise ValueError(
                f"quantization_config leaves out queries, keys and values of {layers - count} of the draft "
                "head's layers; they must be quantised in all layers or in none"
            )
    return blocks


def kept_packed(config: ModelConfig) -> ModelConfig:
    """The config of the same model with its experts kept packed in MXFP4."""
    return replace(config, quantization=PACKED)


def with_quantization(config: Config, quantization: Quantization | None) -> Config:
    """The config of the same model with another quantisation, or with None."""
    if isinstance(config, DraftHeadConfig):
        return replace(config, layers=replace(config.layers, quantization=quantization))
    return replace(config, quantization=quantization)


def _build(
    config: ModelConfig | DraftHeadConfig, rngs: nnx.Rngs, dtype: jnp.dtype
) -> Transformer | DraftHead:
    """The module without quantised parameters."""
    if isinstance(config, DraftHeadConfig):
        return DraftHead(config, rngs=rngs, dtype=dtype)
    return family_of(config)(config, rngs=rngs, dtype=dtype)


def dtype_of(config: ModelConfig | DraftHeadConfig, path: ParameterPath, dtype: jnp.dtype) -> jnp.dtype:
    """The type of the parameter at ``path`` in a model of type ``dtype``.

    Quantised parameters keep their types: FP8 values with float32 scales, or bytes of MXFP4.
    """
    if is_quantized(path):
        quantization = quantization_of(config)
        if quantization is not None and quantization.is_mxfp4:
            return jnp.dtype(jnp.uint8)
        return FP8 if path[-1] == VALUES else jnp.dtype(jnp.float32)
    family = DraftHead if isinstance(config, DraftHeadConfig) else family_of(config)
    return jnp.dtype(jnp.float32) if key_path(path) in family.FLOAT32 else dtype


class _OneKey(nnx.Rngs):
    """Returns the same key every time: shapes do not depend on keys, and counting keys in a trace is slow."""

    def __init__(self):
        super().__init__(0)
        self._key = nnx.Variable(jax.random.key(0))

    def params(self) -> jax.Array:
        return self._key[...]


def weights_of(module: nnx.Module) -> Weights:
    """A module's parameters as a plain pytree."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


@overload
def bind(config: ModelConfig, weights: Weights) -> Transformer: ...
@overload
def bind(config: DraftHeadConfig, weights: Weights) -> DraftHead: ...
def bind(config, weights):
    """The module of a config with the given parameters; call it while tracing, where it costs nothing."""
    graph, shapes = _split(config)
    state = jax.tree.map(lambda shape: shape, shapes)  # a copy, whose entries are replaced
    nnx.replace_by_pure_dict(state, weights)
    return nnx.merge(graph, state)


@functools.cache
def _split(config: ModelConfig | DraftHeadConfig) -> tuple[Any, Any]:
    """A module's structure and its parameters' shapes: the same for all programs of a config."""
    return nnx.split(abstract(config))
