"""The config of Gemma 4 (``model_type`` "gemma4_text"): full layers have fewer and wider heads."""

from typing import Any

from jetspec_jax.config.fields import MAX_EXPERTS, MAX_HEADS, Fields
from jetspec_jax.config.geometry import Experts, LayerConfig, ModelConfig
from jetspec_jax.config.layers import (
    check_heads,
    check_top_k,
    read_decoder,
    read_exceptions,
    read_heads,
    read_layer_types,
    read_num_layers,
    read_window,
)
from jetspec_jax.config.rope import FULL, SLIDING, read_layer_ropes
from pallas_kernels.activation import GELU_TANH
from pallas_kernels.expert_choice import RouterRule

#: Keys of the multimodal model (``model_type`` "gemma4") that do not affect text.
WRAPPER_KEYS = (
    "vision_config",
    "audio_config",
    "vision_soft_tokens_per_image",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
    "video_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "audio_token_id",
)


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Gemma 4 config."""
    fields.only("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    # The family's defaults describe its smallest models, which have per-layer embeddings.
    fields.only("hidden_size_per_layer_input", 0, default=256, feature="per-layer embeddings")
    fields.inert("vocab_size_per_layer_input")
    fields.only("num_kv_shared_layers", 0, default=0, feature="layers that share keys and values")
    fields.only("use_double_wide_mlp", False, default=False)
    # "vision" makes tokens of one image attend to each other; text stays causal.
    fields.only("use_bidirectional_attention", "vision", False, None)
    decoder = read_decoder(fields)
    kinds = _layer_types(fields)
    shares = fields.flag("attention_k_eq_v")
    heads = _heads(fields, kinds, shares)
    ropes = read_layer_ropes(
        fields, {kind: sizes["head_dim"] for kind, sizes in heads.items()}, ("default", "proportional")
    )
    window = read_window(fields, SLIDING in kinds)
    feed_forward = {
        "mlp_size": fields.integer("intermediate_size"),
        "activation": GELU_TANH,
        "experts": _experts(fields),
    }
    layers = {
        kind: LayerConfig(
            **sizes,
            **feed_forward,
            rope=ropes[kind],
            window=window if kind == SLIDING else None,
            attention_scale=1.0,
            keys_as_values=shares and kind == FULL,
        )
        for kind, sizes in heads.items()
    }
    return ModelConfig(
        model_type="gemma4_text",
        **decoder,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        layers=tuple(layers[kind] for kind in kinds),
        embedding_scale=decoder["hidden_size"] ** 0.5,
        logit_softcap=fields.optional("final_logit_softcapping"),
    )


def _layer_types(fields: Fields) -> list[str]:
    """Each layer's type. The last layer must be full: transformers runs it so whatever the list says."""
    kinds = read_layer_types(fields, read_num_layers(fields))
    if kinds is None:
        raise fields.error("layer_types", "a list", None)
    if kinds[-1] != FULL:
        raise ValueError(f"{fields.where}: the last of layer_types must be {FULL}, not {kinds[-1]}")
    return kinds


def _heads(fields: Fields, kinds: list[str], shares: bool) -> dict[str, dict[str, Any]]:
    """Head counts and sizes of each layer type, as arguments of `LayerConfig`.

    The older dialect has separate keys for full layers; the newer has an object of exceptions per layer.
    """
    usual = read_heads(fields)
    newer = _exceptions(fields, kinds, usual) if "per_layer_config" in fields else {}
    full = dict(newer.get(FULL, usual))
    if not newer or "global_head_dim" in fields:
        full["head_dim"] = fields.integer("global_head_dim", most=MAX_HEADS)
    if "num_global_key_value_heads" in fields:
        kv_heads = fields.integer("num_global_key_value_heads", most=MAX_HEADS)
        # Without `attention_k_eq_v` the key may be present and has no effect.
        full["num_kv_heads"] = kv_heads if shares else usual["num_kv_heads"]
    heads = {SLIDING: usual, **newer, FULL: full}
    fields.check_agree("per_layer_config", newer, heads, "global_head_dim", "num_global_key_value_heads")
    for sizes in heads.values():
        check_heads(fields.where, sizes["num_heads"], sizes["num_kv_heads"], sizes["head_dim"])
    return heads


def _exceptions(fields: Fields, kinds: list[str], usual: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Heads of each layer type by ``per_layer_config``, whose keys are layer indices."""
    found = [dict(usual) for _ in kinds]
    for layer, exception in read_exceptions(fields, len(kinds)).items():
        for key, name in (("head_dim", "head_dim"), ("num_key_value_heads", "num_kv_heads")):
            if key in exception:
                found[layer][name] = exception.integer(key, most=MAX_HEADS)
        exception.done()
    heads = {SLIDING: usual}
    for kind in dict.fromkeys(kinds):
        of_kind = [sizes for sizes, other in zip(found, kinds, strict=True) if other == kind]
        if any(sizes != of_kind[0] for sizes in of_kind):
            raise ValueError(f"{fields.where}: layers of {kind} differ in per_layer_config; not supported")
        heads[kind] = of_kind[0]
    return heads


def _experts(fields: Fields) -> Experts | None:
    if not fields.flag("enable_moe_block"):
        fields.inert("num_experts", "top_k_experts", "moe_intermediate_size")
        return None
    experts = Experts(
        count=fields.integer("num_experts", most=MAX_EXPERTS),
        size=fields.integer("moe_intermediate_size"),
        routing=RouterRule(fields.integer("top_k_experts", most=MAX_EXPERTS)),
        activation=GELU_TANH,
    )
    check_top_k(fields, experts, "top_k_experts")
    return experts
