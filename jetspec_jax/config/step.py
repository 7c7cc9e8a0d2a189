"""The config of Step-3.7-Flash's text model (``model_type`` "step3p5"): the hub's dialect, or transformers'.

The hub's lists of layers also include the layers for multi-token prediction, which are not run here.
"""

from dataclasses import replace

from jetspec_jax.arguments import shown
from jetspec_jax.config.fields import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_TOKENS, Fields, is_number
from jetspec_jax.config.geometry import Experts, LayerConfig, ModelConfig, Rope
from jetspec_jax.config.layers import (
    check_heads,
    check_top_k,
    is_index,
    read_decoder,
    read_exceptions,
    read_layer_types,
    read_num_layers,
    read_window,
)
from jetspec_jax.config.rope import FULL, SLIDING, part_of_head, read_layer_ropes, read_older_layer_rope
from pallas_kernels.activation import SILU, Activation
from pallas_kernels.expert_choice import RouterRule

#: Keys of the multimodal model (``model_type`` "step3p7") that do not affect text.
WRAPPER_KEYS = (
    "vision_config",
    "projector_bias",
    "understand_projector_stride",
    "image_token_id",
    "image_token_len",
    "patch_token_len",
    "im_start_token",
    "im_start_token_id",
    "im_end_token",
    "im_end_token_id",
    "im_patch_token",
)

# Keys with one supported value. They may be absent; any other value is refused.
FIXED = {
    "hidden_act": "silu",
    "gating": True,
    "use_head_wise_attn_gate": True,
    "use_bidirectional_attention": False,
    "att_impl_type": "GQA",
    "sink": False,
    "use_rope_layers": [],
    "yarn_only_types": [FULL],
    "zero_centered": True,
    "use_moe": True,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "use_moe_router_bias": True,
}


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Step config."""
    for key, value in FIXED.items():
        fields.only(key, value, default=value)
    # Published files have `use_qk_norm` false, and yet contain these norms, which all readers apply.
    fields.inert("use_qk_norm")
    # The router's logits are float32 in any case, and the layers with experts are listed elsewhere.
    fields.inert("need_fp32_gate", "moe_layer_offset", "moe_every_n_layer", "output_router_logits")
    fields.inert("max_seq_len", "mtp_layer_types", "mtp_mlp_layer_types")
    # Published files omit it, and all readers agree on this default.
    fields.assume(rms_norm_eps=1e-5)
    decoder, num_layers = read_decoder(fields), read_num_layers(fields)
    surplus = fields.integer(
        "num_nextn_predict_layers", "num_mtp_layers", least=0, most=MAX_LAYERS, default=0
    )
    kinds = read_layer_types(fields, num_layers, surplus)
    if kinds is None:
        raise fields.error("layer_types", "a list", None)
    head_dim = fields.integer("head_dim", most=MAX_HEADS)
    kv_heads = fields.integer("num_key_value_heads", "num_attention_groups", most=MAX_HEADS)
    fields.only("query_pre_attn_scalar", head_dim, default=head_dim)
    ropes = _ropes(fields, kinds, head_dim, surplus)
    window = read_window(fields, SLIDING in kinds)
    heads = _heads(fields, kinds, kv_heads, head_dim)
    for count in sorted(set(heads)):
        check_heads(fields.where, count, kv_heads, head_dim)
    sparse = _sparse(fields, num_layers, surplus)
    experts, dense_size = _experts(fields), fields.integer("intermediate_size")
    shared_size = fields.integer("share_expert_dim", "share_expert_dims")
    # Shared experts are dense blocks with the same bounds.
    dense = _activations(fields, "swiglu_limits_shared", num_layers, surplus)
    routed = _activations(fields, "swiglu_limits", num_layers, surplus)
    return ModelConfig(
        model_type="step3p5",
        **decoder,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        further_layers=surplus,
        layers=tuple(
            LayerConfig(
                num_heads=heads[i],
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                rope=ropes[i],
                window=window if kinds[i] == SLIDING else None,
                mlp_size=shared_size if sparse[i] else dense_size,
                activation=dense[i],
                experts=replace(experts, activation=routed[i]) if sparse[i] else None,
            )
            for i in range(num_layers)
        ),
    )


def _experts(fields: Fields) -> Experts:
    """The experts of all layers with experts, without the bound of their activation."""
    top_k = "num_experts_per_tok", "moe_top_k"
    routing = RouterRule(
        fields.integer(*top_k, most=MAX_EXPERTS),
        scores="sigmoid",
        scale=fields.positive("moe_router_scaling_factor"),
    )
    count = fields.integer("n_routed_experts", "moe_num_experts", "num_local_experts", most=MAX_EXPERTS)
    experts = Experts(count, fields.integer("moe_intermediate_size"), routing)
    check_top_k(fields, experts, *top_k)
    return experts


def _heads(fields: Fields, kinds: list[str], kv_heads: int, head_dim: int) -> list[int]:
    """Query heads of each layer, from up to three keys; sliding layers may have more."""
    full = fields.integer("num_attention_heads", most=MAX_HEADS)
    sliding = full
    if "num_sliding_attention_heads" in fields:
        sliding = fields.integer("num_sliding_attention_heads", most=MAX_HEADS)
    if (other := fields.object("attention_other_setting")) is not None:
        count = other.integer("num_attention_heads", most=MAX_HEADS)
        if "num_sliding_attention_heads" in fields and count != sliding:
            raise ValueError(f"{other.where} has {count} heads, and num_sliding_attention_heads is {sliding}")
        sliding = count
        for key, value in (
            ("attention_type", SLIDING),
            ("num_attention_groups", kv_heads),
            ("head_dim", head_dim),
            ("true_head_dim", head_dim),
        ):
            other.only(key, value, default=value)
        other.done()
    heads = [sliding if kind == SLIDING else full for kind in kinds]
    if "per_layer_config" in fields:
        exceptions = read_exceptions(fields, len(kinds))
        for layer, expected in enumerate(heads):
            found = full
            if (exception := exceptions.get(layer)) is not None:
                found = exception.integer("num_attention_heads", most=MAX_HEADS)
                exception.done()
            if found != expected:
                raise ValueError(
                    f"{fields.where}: per_layer_config gives layer {layer} {found} heads, "
                    f"and its type {expected}"
                )
    return heads


def _sparse(fields: Fields, num_layers: int, surplus: int) -> list[bool]:
    """Whether each layer has experts. The hub's dialect lists the layers with experts, as text or numbers."""
    newer = []
    if "mlp_layer_types" in fields:
        kinds = fields.layers("mlp_layer_types", num_layers, surplus=surplus) or []
        if unknown := sorted({str(kind) for kind in kinds} - {"dense", "sparse"}):
            raise ValueError(f"{fields.where}: unsupported layer types {unknown} in mlp_layer_types")
        newer = [kind == "sparse" for kind in kinds]
        if "moe_layers_enum" not in fields:
            return newer
    listed = fields.get("moe_layers_enum")
    items = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(items, list) or not all(is_index(str(item).strip(), MAX_TOKENS) for item in items):
        raise fields.error("moe_layers_enum", "the layers that have experts", listed)
    sparse = {int(item) for item in items}
    if beyond := [layer for layer in sparse if layer >= num_layers + surplus]:
        raise ValueError(f"{fields.where}: moe_layers_enum has {shown(beyond)} of {num_layers} layers")
    older = [layer in sparse for layer in range(num_layers)]
    fields.check_agree("mlp_layer_types", newer, older, "moe_layers_enum")
    return older


def _activations(fields: Fields, key: str, num_layers: int, surplus: int) -> list[Activation]:
    """Each layer's SiLU, with the bound from the list; null and 0 mean no bound."""
    limits = fields.layers(key, num_layers, surplus=surplus) or [None] * num_layers
    if not all(limit is None or (is_number(limit) and limit >= 0) for limit in limits):
        raise fields.error(key, "bounds that are not negative", limits)
    return [Activation.step(float(limit)) if limit else SILU for limit in limits]


def _ropes(fields: Fields, kinds: list[str], head_dim: int, surplus: int) -> list[Rope]:
    """Each layer's rotary embedding. The hub's dialect has bases and rotated fractions per layer."""
    types, newer, count = ("default", "llama3"), [], len(kinds)
    if "rope_parameters" in fields:
        by_kind = read_layer_ropes(fields, dict.fromkeys(kinds, head_dim), types, partial=True)
        newer = [by_kind[kind] for kind in kinds]
    objects = fields.get("rope_parameters", {})
    bases = fields.layers("rope_theta", count, surplus=surplus)
    parts = fields.layers("partial_rotary_factors", count, surplus=surplus)
    if bases is None and not newer:
        raise fields.error("rope_theta", "a list", None)
    for key, values in (("rope_theta", bases), ("partial_rotary_factors", parts)):
        if not all(is_number(value) and value > 0 for value in values or []):
            raise fields.error(key, "a list of positive numbers", values)
    for part in set(parts or []) - {1.0}:
        part_of_head(fields.where, "partial_rotary_factors", part, head_dim)
    scaling = fields.object("rope_scaling")  # of full layers only
    older = [
        read_older_layer_rope(
            fields.where,
            objects.get(kind, {}),
            scaling if kind == FULL else None,
            head_dim,
            types,
            partial=True,
            rope_theta=base,
            partial_rotary_factor=part,
        )
        for kind, base, part in zip(kinds, bases or [None] * count, parts or [None] * count, strict=True)
    ]
    fields.check_agree(
        "rope_parameters", newer, older, "rope_theta", "partial_rotary_factors", "rope_scaling"
    )
    return older
