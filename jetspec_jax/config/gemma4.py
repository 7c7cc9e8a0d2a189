"""The config of Gemma 4 (``model_type`` "gemma4_text"): full layers have wider heads, and fewer of them."""

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

#: Keys of the model of all modalities (``model_type`` "gemma4") that say nothing about text.
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
    """Reads the keys of a Gemma 4 config.

    Raises:
        ValueError: A key is missing, out of its range, or changes the maths and is not supported.
    """
    fields.only("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    # The smallest models have them, and those are what the family's defaults describe.
    fields.only("hidden_size_per_layer_input", 0, default=256, feature="per-layer embeddings")
    fields.inert("vocab_size_per_layer_input")
    fields.only("num_kv_shared_layers", 0, default=0, feature="layers that share keys and values")
    fields.only("use_double_wide_mlp", False, default=False)
    # Tokens of one image see each other; those of text do not.
    fields.only("use_bidirectional_attention", "vision", False, None)
    decoder = read_decoder(fields)
    kinds = _layer_types(fields)
    shares = fields.flag("attention_k_eq_v")
    heads = _heads(fields, kinds, shares)
    ropes = read_layer_ropes(
        fields, {kind: own["head_dim"] for kind, own in heads.items()}, ("default", "proportional")
    )
    window = read_window(fields, SLIDING in kinds)
    feed_forward = {
        "mlp_size": fields.integer("intermediate_size"),
        "activation": GELU_TANH,
        "experts": _experts(fields),
    }
    layers = {
        kind: LayerConfig(
            **own,
            **feed_forward,
            rope=ropes[kind],
            window=window if kind == SLIDING else None,
            attention_scale=1.0,
            keys_as_values=shares and kind == FULL,
        )
        for kind, own in heads.items()
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
    """Of each layer whether it slides; the last one must not, and transformers runs it as if it did not."""
    kinds = read_layer_types(fields, read_num_layers(fields))
    if kinds is None:
        raise fields.error("layer_types", "a list", None)
    if kinds[-1] != FULL:
        raise ValueError(f"{fields.where}: the last of layer_types must be {FULL}, not {kinds[-1]}")
    return kinds


def _heads(fields: Fields, kinds: list[str], shares: bool) -> dict[str, dict[str, Any]]:
    """Query heads, KV heads and their size of each type of layer, as arguments of `LayerConfig`.

    The older dialect has keys for full layers; the newer one an object of exceptions, layer by layer.
    """
    usual = read_heads(fields)
    newer = _exceptions(fields, kinds, usual) if "per_layer_config" in fields else {}
    full = dict(newer.get(FULL, usual))
    if not newer or "global_head_dim" in fields:
        full["head_dim"] = fields.integer("global_head_dim", most=MAX_HEADS)
    if "num_global_key_value_heads" in fields:
        kv_heads = fields.integer("num_global_key_value_heads", most=MAX_HEADS)
        # Models whose layers all have values of their own may have the key, and do not heed it.
        full["num_kv_heads"] = kv_heads if shares else usual["num_kv_heads"]
    heads = {SLIDING: usual, **newer, FULL: full}
    fields.check_agree("per_layer_config", newer, heads, "global_head_dim", "num_global_key_value_heads")
    for own in heads.values():
        check_heads(fields.where, own["num_heads"], own["num_kv_heads"], own["head_dim"])
    return heads


def _exceptions(fields: Fields, kinds: list[str], usual: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Heads of each type of layer by ``per_layer_config``, which names layers by their index."""
    found = [dict(usual) for _ in kinds]
    for layer, own in read_exceptions(fields, len(kinds)).items():
        for key, name in (("head_dim", "head_dim"), ("num_key_value_heads", "num_kv_heads")):
            if key in own:
                found[layer][name] = own.integer(key, most=MAX_HEADS)
        own.done()
    heads = {SLIDING: usual}
    for kind in dict.fromkeys(kinds):
        of_kind = [own for own, other in zip(found, kinds, strict=True) if other == kind]
        if any(own != of_kind[0] for own in of_kind):
            raise ValueError(f"{fields.where}: layers of {kind} differ in per_layer_config; not supported")
        heads[kind] = of_kind[0]
    return heads


def _experts(fields: Fields) -> Experts | None:
    """The experts of all layers, if there are any."""
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
