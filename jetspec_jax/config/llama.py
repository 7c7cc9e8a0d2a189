"""The config of Llama (``model_type`` "llama"): Llama 2 and 3, SmolLM2, and others with the same layers."""

from jetspec_jax.config.fields import Fields
from jetspec_jax.config.geometry import LayerConfig, ModelConfig
from jetspec_jax.config.layers import read_decoder, read_heads, read_num_layers
from jetspec_jax.config.rope import LLAMA_THETA, LLAMA_TYPES, read_rope


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Llama config."""
    fields.only("hidden_act", "silu", default="silu")
    # Keys of SmolLM2: the first two are for its trainer, the last for another runtime.
    fields.only("rope_interleaved", False, default=False)
    fields.inert("is_llama_config", "transformers.js_config")
    heads = read_heads(fields, fields.integer("hidden_size"))
    rope = read_rope(fields, heads["head_dim"], LLAMA_TYPES, theta=LLAMA_THETA)
    bias = fields.flag("attention_bias")
    layer = LayerConfig(
        **heads,
        rope=rope,
        qkv_bias=bias,
        output_bias=bias,
        mlp_size=fields.integer("intermediate_size"),
        mlp_bias=fields.flag("mlp_bias"),
    )
    return ModelConfig(
        model_type="llama",
        **read_decoder(fields, rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=(layer,) * read_num_layers(fields),
    )
