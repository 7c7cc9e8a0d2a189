"""The config of Qwen2 and Qwen2.5 (``model_type`` "qwen2"): attention has biases, but no norms of heads."""

from jetspec_jax.config.fields import Fields
from jetspec_jax.config.geometry import LayerConfig, ModelConfig
from jetspec_jax.config.layers import read_decoder, read_heads, read_late_windows, read_num_layers
from jetspec_jax.config.rope import QWEN3_TYPES, read_rope


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Qwen2 config."""
    fields.only("hidden_act", "silu", default="silu")
    fields.only("attention_bias", True, default=True)
    fields.only("use_mrope", False, default=False)
    heads = read_heads(fields, fields.integer("hidden_size"))
    rope = read_rope(fields, heads["head_dim"], QWEN3_TYPES)
    decoder, mlp_size = read_decoder(fields, rope), fields.integer("intermediate_size")
    return ModelConfig(
        model_type="qwen2",
        **decoder,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(
            LayerConfig(**heads, rope=rope, window=window, qkv_bias=True, mlp_size=mlp_size)
            for window in read_late_windows(fields, read_num_layers(fields))
        ),
    )
