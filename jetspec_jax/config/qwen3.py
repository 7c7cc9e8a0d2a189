"""The config of Qwen3 (``model_type`` "qwen3"), also used for a draft head's layers."""

from jetspec_jax.config.fields import Fields
from jetspec_jax.config.geometry import LayerConfig, ModelConfig
from jetspec_jax.config.layers import read_decoder, read_heads, read_late_windows, read_num_layers
from jetspec_jax.config.rope import QWEN3_TYPES, read_rope


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Qwen3 config."""
    fields.only("hidden_act", "silu", default="silu")
    heads = read_heads(fields)
    rope = read_rope(fields, heads["head_dim"], QWEN3_TYPES)
    decoder, mlp_size = read_decoder(fields, rope), fields.integer("intermediate_size")
    return ModelConfig(
        model_type="qwen3",
        **decoder,
        # transformers omits the key if it has the default.
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(
            LayerConfig(**heads, rope=rope, window=window, mlp_size=mlp_size)
            for window in read_late_windows(fields, read_num_layers(fields))
        ),
    )
