"""The config of Gemma 3 (``model_type`` "gemma3_text"): all but every sixth layer slide."""

from jetspec_jax.config.fields import MAX_TOKENS, Fields
from jetspec_jax.config.geometry import LayerConfig, ModelConfig, Rope
from jetspec_jax.config.layers import read_decoder, read_heads, read_layer_types, read_num_layers
from jetspec_jax.config.rope import FULL, SLIDING, read_layer_ropes, read_older_layer_rope
from pallas_kernels.activation import GELU_TANH

#: Keys of the multimodal model (``model_type`` "gemma3") that do not affect text.
WRAPPER_KEYS = (
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
)


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Gemma 3 config."""
    fields.only("hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    fields.only("attn_logit_softcapping", None)
    fields.only("use_bidirectional_attention", None, False)
    fields.inert("cache_implementation")
    # Published files of 4B and larger omit keys whose values equal those of the 4B model.
    fields.assume(
        vocab_size=262208,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=256,
        query_pre_attn_scalar=256,
        rms_norm_eps=1e-6,
        max_position_embeddings=131072,
    )
    decoder, heads = read_decoder(fields), read_heads(fields)
    kinds, ropes = _layer_types(fields), _ropes(fields, heads["head_dim"])
    window = fields.integer("sliding_window", most=MAX_TOKENS)
    shared = {
        **heads,
        "attention_scale": fields.positive("query_pre_attn_scalar") ** -0.5,
        "mlp_size": fields.integer("intermediate_size"),
        "activation": GELU_TANH,
    }
    return ModelConfig(
        model_type="gemma3_text",
        **decoder,
        # Published files omit the key, and all are tied.
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=True),
        layers=tuple(
            LayerConfig(**shared, rope=ropes[kind], window=window if kind == SLIDING else None)
            for kind in kinds
        ),
        embedding_scale=decoder["hidden_size"] ** 0.5,
        logit_softcap=fields.optional("final_logit_softcapping"),
    )


def _layer_types(fields: Fields) -> list[str]:
    """Each layer's type; in the older dialect every ``sliding_window_pattern``-th layer is full."""
    num_layers = read_num_layers(fields)
    # Newer files have the pattern beside the list, whether or not the list follows it.
    fields.inert("sliding_window_pattern")
    if (kinds := read_layer_types(fields, num_layers)) is not None:
        return kinds
    fields.assume(sliding_window_pattern=6)  # omitted like the sizes above
    pattern = fields.integer("sliding_window_pattern")
    return [FULL if (layer + 1) % pattern == 0 else SLIDING for layer in range(num_layers)]


def _ropes(fields: Fields, head_dim: int) -> dict[str, Rope]:
    """The rotary embedding of each layer type; in the older dialect only full layers are scaled."""
    types, newer = ("default", "linear"), {}
    if "rope_parameters" in fields:
        newer = read_layer_ropes(fields, {FULL: head_dim, SLIDING: head_dim}, types)
    else:
        fields.assume(rope_theta=1e6, rope_local_base_freq=1e4)  # omitted like the sizes above
    objects, older = fields.get("rope_parameters", {}), {}
    for kind, key, scaling in (
        (FULL, "rope_theta", fields.object("rope_scaling")),
        (SLIDING, "rope_local_base_freq", None),
    ):
        older[kind] = read_older_layer_rope(
            fields.where, objects.get(kind, {}), scaling, head_dim, types, rope_theta=fields.optional(key)
        )
    fields.check_agree("rope_parameters", newer, older, "rope_theta", "rope_local_base_freq", "rope_scaling")
    return older
