"""Configs of Gemma 3: both dialects, alone or below another model's, and what is refused."""

from jetspec_jax.config import LayerConfig, ModelConfig, Rope, parse_model_config
from jetspec_jax.config.geometry import Linear
from pallas_kernels.activation import GELU_TANH

COMMON = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 12,
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "max_position_embeddings": 128,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 25,
    "rms_norm_eps": 1e-6,
    "sliding_window": 16,
    "use_cache": True,
    "vocab_size": 19,
}
OLDER = {
    **COMMON,
    "cache_implementation": "hybrid",
    "rope_local_base_freq": 20000.0,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "rope_theta": 500000.0,
    "sliding_window_pattern": 3,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
}
NEWER = {
    **COMMON,
    "_sliding_window_pattern": 6,  # written whatever the list is
    "dtype": "bfloat16",
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {"factor": 8.0, "rope_theta": 500000.0, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 20000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "transformers_version": "5.23.0",
    "use_bidirectional_attention": False,
}
# What google/gemma-3-4b-it publishes, but for its vision_config: all else is the family's.
PUBLISHED_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}


def nested(text):
    """A text model's config as a part of one for images."""
    return {**PUBLISHED_4B, "text_config": text}


def test_what_is_read():
    shared = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "attention_scale": 0.2,
        "mlp_size": 20,
        "activation": GELU_TANH,
    }
    sliding = LayerConfig(**shared, rope=Rope(2e4, 8), window=16)
    full = LayerConfig(**shared, rope=Rope(5e5, 8, scaling=Linear(8.0)))
    expected = ModelConfig(
        model_type="gemma3_text",
        vocab_size=19,
        hidden_size=12,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        layers=(sliding, sliding, full, sliding),
        embedding_scale=12**0.5,
    )
    assert parse_model_config(OLDER) == expected


def test_published():
    config = parse_model_config(PUBLISHED_4B)
    layer = config.layers[0]
    assert (config.vocab_size, config.max_position_embeddings, config.tie_word_embeddings) == (
        *(262208, 131072, True),
    )
    assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.attention_scale) == (8, 4, 256, 1 / 16)
    assert [i for i, window in enumerate(config.windows) if window is None] == [5, 11, 17, 23, 29]
    assert {window for window in config.windows if window is not None} == {1024}
    assert (layer.rope, config.layers[5].rope) == (Rope(1e4, 256), Rope(1e6, 256, scaling=Linear(8.0)))
    assert config.embedding_scale == 2560**0.5


def test_logits_that_are_capped():
    assert parse_model_config({**OLDER, "final_logit_softcapping": 30.0}).logit_softcap == 30
