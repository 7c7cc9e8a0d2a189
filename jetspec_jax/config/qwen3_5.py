"""The configs of Qwen3.5 and its successors (``model_type`` "qwen3_5_text" and "qwen3_5_moe_text").

Most layers are recurrent; every fourth, in published models, has gated attention. The two families differ in
their feed-forward blocks: dense, or experts.
"""

from typing import Any

from jetspec_jax.config.fields import MAX_EXPERTS, MAX_HEADS, MAX_KERNEL, MAX_LAYERS, Fields
from jetspec_jax.config.geometry import Experts, LayerConfig, ModelConfig, Recurrence
from jetspec_jax.config.layers import (
    check_top_k,
    read_decoder,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_routed_layers,
)
from jetspec_jax.config.rope import FULL, QWEN3_TYPES, read_rope
from pallas_kernels.expert_choice import RouterRule

RECURRENT = "linear_attention"
#: Keys of the multimodal models ("qwen3_5", "qwen3_5_moe") that do not affect text.
WRAPPER_KEYS = (
    "vision_config",
    "language_model_only",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
# Positions on several axes, which are all equal for text.
_AXES_OF_POSITIONS = ("mrope_section", "mrope_interleaved")


def read_dense(fields: Fields) -> ModelConfig:
    """Reads the keys of a Qwen3.5 config without experts."""
    fields.inert("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    num_layers = read_num_layers(fields)
    read_routed_layers(fields, num_layers)  # published files have these keys, and all layers are dense
    block = {"mlp_size": fields.integer("intermediate_size")}
    return read_hybrid(fields, "qwen3_5_text", [block] * num_layers)


def read_moe(fields: Fields) -> ModelConfig:
    """Reads the keys of a Qwen3.5 config with experts."""
    fields.inert("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    fields.only("norm_topk_prob", True, default=True)
    fields.only("decoder_sparse_step", 1, default=1)
    return read_hybrid(fields, "qwen3_5_moe_text", read_blocks(fields, renormalise=True))


def read_blocks(fields: Fields, *, renormalise: bool) -> list[dict[str, Any]]:
    """Each layer's feed-forward block, as arguments of `LayerConfig`: routed and shared experts, or dense."""
    fields.inert("router_aux_loss_coef", "output_router_logits", "intermediate_size")
    experts = Experts(
        count=fields.integer("num_experts", most=MAX_EXPERTS),
        size=fields.integer("moe_intermediate_size"),
        routing=RouterRule(fields.integer("num_experts_per_tok", most=MAX_EXPERTS), renormalise=renormalise),
    )
    check_top_k(fields, experts, "num_experts_per_tok")
    mixed = {"mlp_size": fields.integer("shared_expert_intermediate_size"), "experts": experts}
    num_layers = read_num_layers(fields)
    routed = read_routed_layers(fields, num_layers)
    if len(routed) == num_layers:
        return [mixed] * num_layers
    dense = {"mlp_size": fields.integer("intermediate_size")}
    return [mixed if layer in routed else dense for layer in range(num_layers)]


def read_hybrid(fields: Fields, model_type: str, blocks: list[dict[str, Any]]) -> ModelConfig:
    """Reads the keys that these families share; ``blocks`` are as from `read_blocks`."""
    fields.only("hidden_act", "silu", default="silu")
    fields.only("attn_output_gate", True, default=True)
    fields.only("output_gate_type", "swish", "silu", default="swish")  # two names of one function
    fields.only("mamba_ssm_dtype", "float32", default="float32")
    heads = read_heads(fields)
    rope = read_rope(fields, heads["head_dim"], QWEN3_TYPES, share=0.25, inert=_AXES_OF_POSITIONS)
    kinds = _layer_types(fields, len(blocks))
    recurrent = {"num_heads": 0, "num_kv_heads": 0, "head_dim": 0, "recurrence": _recurrence(fields)}
    return ModelConfig(
        model_type=model_type,
        **read_decoder(fields, rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(
            LayerConfig(**(heads if kind == FULL else recurrent), rope=rope, **block)
            for kind, block in zip(kinds, blocks, strict=True)
        ),
    )


def _layer_types(fields: Fields, num_layers: int) -> list[str]:
    """Each layer's type; without a list, every ``full_attention_interval``-th layer has attention."""
    listed = read_layer_types(fields, num_layers, types=(FULL, RECURRENT))
    interval = fields.integer("full_attention_interval", most=MAX_LAYERS, default=4)
    kinds = [RECURRENT if (layer + 1) % interval else FULL for layer in range(num_layers)]
    if listed is not None and "full_attention_interval" in fields and listed != kinds:
        raise ValueError(f"{fields.where}: layer_types and full_attention_interval {interval} differ")
    return kinds if listed is None else listed


def _recurrence(fields: Fields) -> Recurrence:
    key_heads = fields.integer("linear_num_key_heads", most=MAX_HEADS)
    value_heads = fields.integer("linear_num_value_heads", most=MAX_HEADS)
    if value_heads % key_heads:
        raise ValueError(
            f"{fields.where}: linear_num_value_heads {value_heads} is no multiple of linear_num_key_heads "
            f"{key_heads}"
        )
    return Recurrence(
        num_key_heads=key_heads,
        num_value_heads=value_heads,
        key_dim=fields.integer("linear_key_head_dim", most=MAX_HEADS),
        value_dim=fields.integer("linear_value_head_dim", most=MAX_HEADS),
        kernel=fields.integer("linear_conv_kernel_dim", least=2, most=MAX_KERNEL),
    )
