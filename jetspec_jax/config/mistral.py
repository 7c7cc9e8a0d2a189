"""The config of Mistral (``model_type`` "mistral"): Llama's layers, optionally all with a sliding window."""

from jetspec_jax.config.fields import MAX_TOKENS, Fields
from jetspec_jax.config.geometry import LayerConfig, ModelConfig
from jetspec_jax.config.layers import read_decoder, read_heads, read_layer_types, read_num_layers
from jetspec_jax.config.rope import FULL, LLAMA_THETA, LLAMA_TYPES, SLIDING, read_rope


def read(fields: Fields) -> ModelConfig:
    """Reads the keys of a Mistral config."""
    fields.only("hidden_act", "silu", default="silu")
    heads = read_heads(fields, fields.integer("hidden_size"))
    rope = read_rope(fields, heads["head_dim"], LLAMA_TYPES, theta=LLAMA_THETA)
    num_layers = read_num_layers(fields)
    layer = LayerConfig(
        **heads, rope=rope, window=_window(fields, num_layers), mlp_size=fields.integer("intermediate_size")
    )
    return ModelConfig(
        model_type="mistral",
        **read_decoder(fields, rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=(layer,) * num_layers,
    )


def _window(fields: Fields, num_layers: int) -> int | None:
    """The window of all layers; null means none.

    A file without the key is refused, because transformers would use a window of 4,096.
    """
    if "sliding_window" not in fields.raw:
        raise fields.error("sliding_window", "a number of tokens, or null for none", "absent")
    window = fields.integer("sliding_window", most=MAX_TOKENS) if "sliding_window" in fields else None
    expected = FULL if window is None else SLIDING
    kinds = read_layer_types(fields, num_layers) or ()
    if other := sorted(set(kinds) - {expected}):
        raise ValueError(
            f"{fields.where}: layer_types has {other}, and with sliding_window {window} all layers of this "
            f"family are of type {expected}"
        )
    return window
