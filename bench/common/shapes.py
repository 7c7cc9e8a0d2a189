"""Published model shapes by name: a target and a draft head, without weights."""

import functools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from bench.common.options import check_known
from jetspec_jax.config import DraftHeadConfig, ModelConfig, Rope, default_tap_layers, parse_model_config
from jetspec_jax.config.geometry import SelectorConfig
from jetspec_jax.config.quantization import FP8, PACKED, Quantization
from jetspec_jax.models import abstract, quantized_blocks, weights_of, with_quantization
from pallas_kernels.mxfp4 import BLOCK, BLOCK_BYTES

# Parameters of a draft head that turn taps into context features; a proposal does not use them.
FEATURES = frozenset({"fc", "hidden_norm"})
# The parameters of routed experts, without their router.
EXPERTS = frozenset({"experts"})


class PairShape(NamedTuple):
    """A target and a draft head that fits it."""

    target: ModelConfig
    head: DraftHeadConfig


def _dense(
    *, layers: int, hidden: int, intermediate: int, heads: int, kv_heads: int = 8, tied: bool = False
) -> dict[str, Any]:
    """The config of a published Qwen3."""
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "max_position_embeddings": 40960,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }


def _qwen3(raw: dict[str, Any], layers: int = 5, **head: Any) -> PairShape:
    """A dense Qwen3, and a head of ``layers`` such layers; the defaults are the published heads'."""
    target = parse_model_config(raw)
    stack = replace(target, layers=target.layers[:1] * layers, tie_word_embeddings=False)
    # The mask token is an id that Qwen3's tokenizer does not use.
    return PairShape(
        target, _head(stack, target.num_layers, **{"block_size": 16, "mask_token_id": 151669, **head})
    )


def _published(raw: dict[str, Any], *, layers: int = 5, **head: Any) -> PairShape:
    """A target with its published config, and a head of ``layers`` Qwen3 layers."""
    target = parse_model_config(raw)
    stack = ModelConfig.uniform(
        "qwen3",
        layers,
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        rms_norm_eps=1e-6,
        max_position_embeddings=target.max_position_embeddings,
        **{"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "rope": Rope(1e6, 128), **head},
    )
    head_config = _head(stack, target.num_layers, block_size=16, mask_token_id=target.vocab_size - 1, taps=5)
    return PairShape(target, head_config)


def _head(
    stack: ModelConfig,
    num_target_layers: int,
    *,
    block_size: int,
    mask_token_id: int,
    taps: int | None = None,
) -> DraftHeadConfig:
    return DraftHeadConfig(
        layers=stack,
        block_size=block_size,
        num_target_layers=num_target_layers,
        tap_layers=tuple(default_tap_layers(taps or stack.num_layers, num_target_layers)),
        mask_token_id=mask_token_id,
        causal=True,
    )


# The published configs, without keys that no forward pass depends on.
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

GPT_OSS_20B = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "rope_type": "yarn",
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GEMMA4_26B_A4B = {
    "model_type": "gemma4_text",
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2816,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 2112,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "top_k_experts": 8,
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
}
QWEN3_6_35B_A3B = {
    "model_type": "qwen3_5_moe_text",
    "attn_output_gate": True,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 248320,
}

#: The targets' configs by name, in the form of ``config.json``.
CONFIGS = {
    # Takes seconds on a CPU: it shows that a benchmark works, not how fast anything is.
    "tiny": {
        **_dense(layers=2, hidden=64, intermediate=128, heads=4, kv_heads=2),
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "vocab_size": 512,
    },
    "qwen3-0.6b": _dense(layers=28, hidden=1024, intermediate=3072, heads=16, tied=True),
    "qwen3-1.7b": _dense(layers=28, hidden=2048, intermediate=6144, heads=16, tied=True),
    "qwen3-4b": _dense(layers=36, hidden=2560, intermediate=9728, heads=32, tied=True),
    "qwen3-8b": _dense(layers=36, hidden=4096, intermediate=12288, heads=32),
    "qwen3-14b": _dense(layers=40, hidden=5120, intermediate=17408, heads=40),
    "qwen3-32b": _dense(layers=64, hidden=5120, intermediate=25600, heads=64),
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "gpt-oss-20b": GPT_OSS_20B,
    "gemma4-26b-a4b": GEMMA4_26B_A4B,
    "qwen3.6-35b-a3b": QWEN3_6_35B_A3B,
}

SHAPES = {
    "tiny": _qwen3(CONFIGS["tiny"], 1, block_size=8, mask_token_id=511),
    **{name: _qwen3(raw) for name, raw in CONFIGS.items() if raw["model_type"] == "qwen3" and name != "tiny"},
    "qwen3-30b-a3b": _published(QWEN3_30B_A3B, num_kv_heads=4, mlp_size=6144),
    "gpt-oss-20b": _published(GPT_OSS_20B, mlp_size=8640),
    "gemma4-26b-a4b": _published(GEMMA4_26B_A4B, mlp_size=8448),
    "qwen3.6-35b-a3b": _published(
        QWEN3_6_35B_A3B, layers=8, num_kv_heads=4, rope=Rope(1e7, 128), mlp_size=6144
    ),
}


#: The formats of a target's weights.
STORED = {
    "plain": None,
    "fp8": Quantization(FP8, 128, 128),
    "fp8-activations": Quantization(FP8, 128, 128, fp8_activations=True),
    "mxfp4": PACKED,
}


def stored_as(shape: PairShape, stored: str) -> PairShape:
    """The pair with its target's weights in a format of `STORED`.

    Raises:
        ValueError: There is no such format, or no parameter of the target can have it.
    """
    check_known("weights", [stored], STORED)
    target = replace(shape.target, quantization=STORED[stored])
    if stored != "plain" and not quantized_blocks(target):
        raise ValueError(f"--weights {stored}: no parameter of a {target.model_type} can have that format")
    return shape._replace(target=target)


def with_selector(shape: PairShape, rank: int) -> PairShape:
    """The pair with a selector of this rank in its head, as if trained with 16 candidates and the tail."""
    return shape._replace(head=replace(shape.head, selector=SelectorConfig(rank, 16, tail=True)))


def find_pair_shape(name: str) -> PairShape:
    """The shape with a name; raises ValueError if there is none."""
    check_known("shape", [name], SHAPES)
    return SHAPES[name]


def parameters(config: ModelConfig | DraftHeadConfig, names: frozenset[str] | None = None) -> int:
    """The number of a model's parameters, or of those with one of ``names`` in their path; no scales."""
    sizes = _sizes(with_quantization(config, None))
    return sum(size for path, size in sizes.items() if names is None or not names.isdisjoint(path))


def quantized(config: ModelConfig, names: frozenset[str]) -> tuple[int, float]:
    """The number of a target's quantised parameters with one of ``names`` in their path, and bytes of each.

    The bytes include scales, except FP8's: one of these serves thousands of values.
    """
    sizes = _sizes(with_quantization(config, None))
    found = sum(sizes[path] for path in quantized_blocks(config) if not names.isdisjoint(path))
    packed = config.quantization is not None and config.quantization.is_mxfp4
    return found, BLOCK_BYTES / BLOCK + 1 / BLOCK if packed else 1


@functools.cache
def _sizes(config: ModelConfig | DraftHeadConfig) -> dict[tuple[Any, ...], int]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(weights_of(abstract(config)))
    return {tuple(key.key for key in path): math.prod(leaf.shape) for path, leaf in leaves}
