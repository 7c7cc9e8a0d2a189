"""The config of Qwen3 (``model_type`` "qwen3"), which is also that of a draft head's layers."""

from jetspec_jax.config.fields import MAX_TOKENS, Fields
from jetspec_jax.config.geometry import LayerConfig, ModelConfig
from jetspec_jax.config.layers import read_decoder, read_heads, read_layer_types, read_num_layers
from jetspec_jax.config.rope import QWEN3_TYPES, SLIDING, read_rope


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Qwen3 config.

    Raises:
        ValueError: A key is missing, out of its range, or changes the maths and is not supported.
    """
    fields.only("hidden_act", "silu", default="silu")
    heads = read_heads(fields)
    rope = read_rope(fields, heads["head_dim"], QWEN3_TYPES)
    decoder, mlp_size = read_decoder(fields, rope), fields.integer("intermediate_size")
    return ModelConfig(
        model_type="qwen3",
        **decoder,
        # transformers leaves the key out of files where it holds the family's default.
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(
            LayerConfig(**heads, rope=rope, window=window, mlp_size=mlp_size)
            for window in _windows(fields, read_num_layers(fields))
        ),
    )


def _windows(fields: Fields, num_layers: int) -> list[int | None]:
    """Each layer's window. Qwen3 slides from layer ``max_window_layers`` on, and only if told to."""
    slides = fields.flag("use_sliding_window")
    kinds = read_layer_types(fields, num_layers)
    fields.inert("sliding_window", "max_window_layers")
    if kinds is None:
        if not slides:
            return [None] * num_layers
        # Both keys must be there: the defaults that another reader would fill in change the maths.
        window = fields.integer("sliding_window", most=MAX_TOKENS)
        first = fields.integer("max_window_layers", least=0)
        return [window if layer >= first else None for layer in range(num_layers)]
    if SLIDING not in kinds:
        return [None] * num_layers
    if not slides:
        raise ValueError(f"{fields.where}: layer_types has sliding layers, but no sliding window is in use")
    window = fields.integer("sliding_window", most=MAX_TOKENS)
    return [window if kind == SLIDING else None for kind in kinds]
