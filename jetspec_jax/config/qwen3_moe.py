"""The config of Qwen3-MoE (``model_type`` "qwen3_moe"): Qwen3 with routed experts in most or all layers."""

from jetspec_jax.config.fields import MAX_EXPERTS, Fields
from jetspec_jax.config.geometry import Experts, LayerConfig, ModelConfig
from jetspec_jax.config.layers import (
    check_top_k,
    read_decoder,
    read_heads,
    read_num_layers,
    read_routed_layers,
    read_window,
)
from jetspec_jax.config.rope import QWEN3_TYPES, read_rope
from pallas_kernels.expert_choice import RouterRule


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Qwen3-MoE config."""
    fields.only("hidden_act", "silu", default="silu")
    fields.inert("router_aux_loss_coef", "output_router_logits", "max_window_layers")
    heads = read_heads(fields)
    rope = read_rope(fields, heads["head_dim"], QWEN3_TYPES)
    decoder = read_decoder(fields, rope)
    experts = Experts(
        count=fields.integer("num_experts", "num_local_experts", most=MAX_EXPERTS),
        size=fields.integer("moe_intermediate_size"),
        routing=RouterRule(
            fields.integer("num_experts_per_tok", most=MAX_EXPERTS), renormalise=fields.flag("norm_topk_prob")
        ),
    )
    check_top_k(fields, experts, "num_experts_per_tok")
    shared = {
        **heads,
        "rope": rope,
        # Unlike in Qwen3, either all layers slide or none does.
        "window": read_window(fields, fields.flag("use_sliding_window")),
    }
    num_layers = read_num_layers(fields)
    routed = read_routed_layers(fields, num_layers)
    fields.inert("intermediate_size")
    dense = fields.integer("intermediate_size") if len(routed) < num_layers else 0
    return ModelConfig(
        model_type="qwen3_moe",
        **decoder,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(
            LayerConfig(**shared, experts=experts)
            if layer in routed
            else LayerConfig(**shared, mlp_size=dense)
            for layer in range(num_layers)
        ),
    )
