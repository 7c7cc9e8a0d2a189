"""Configs of Gemma 4: both dialects, alone or below another model's, and what is refused."""

import re

import pytest

from jetspec_jax.config import Experts, LayerConfig, ModelConfig, Rope, parse_model_config
from pallas_kernels.activation import GELU_TANH
from pallas_kernels.expert_choice import RouterRule
from tests.loading.published import without

COMMON = {
    "architectures": ["Gemma4ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "dtype": "bfloat16",
    "enable_moe_block": True,
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 8,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 12,
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "intermediate_size": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "max_position_embeddings": 128,
    "model_type": "gemma4_text",
    "moe_intermediate_size": 5,
    "num_attention_heads": 4,
    "num_experts": 6,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    },
    "sliding_window": 16,
    "tie_word_embeddings": True,
    "top_k_experts": 3,
    "use_bidirectional_attention": "vision",
    "use_cache": True,
    "use_double_wide_mlp": False,
    "vocab_size": 19,
    "vocab_size_per_layer_input": 19,
}
PUBLISHED = {**COMMON, "global_head_dim": 16, "num_global_key_value_heads": 1}
WIDE = {"head_dim": 16, "num_key_value_heads": 1}
SAVED = {**COMMON, "per_layer_config": {"1": WIDE, "3": WIDE}, "use_bidirectional_attention": None}
WRAPPER = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "audio_config": None,
    "audio_token_id": 258881,
    "boa_token_id": 256000,
    "boi_token_id": 255999,
    "dtype": "bfloat16",
    "eoa_token_index": 258883,
    "eoi_token_id": 258882,
    "eos_token_id": [1, 106],
    "image_token_id": 258880,
    "initializer_range": 0.02,
    "model_type": "gemma4",
    "tie_word_embeddings": True,
    "transformers_version": "5.5.0",
    "video_token_id": 258884,
    "vision_config": {"hidden_size": 1152, "model_type": "gemma4_vision"},
    "vision_soft_tokens_per_image": 280,
}


def test_what_is_read():
    experts = Experts(count=6, size=5, routing=RouterRule(3), activation=GELU_TANH)
    shared = {
        "num_heads": 4,
        "attention_scale": 1.0,
        "mlp_size": 20,
        "activation": GELU_TANH,
        "experts": experts,
    }
    sliding = LayerConfig(**shared, num_kv_heads=2, head_dim=8, rope=Rope(1e4, 8), window=16)
    # A quarter of the pairs turns, with the frequencies of a head that turns whole.
    full = LayerConfig(
        **shared, num_kv_heads=1, head_dim=16, rope=Rope(1e6, 16, turning=2), keys_as_values=True
    )
    expected = ModelConfig(
        model_type="gemma4_text",
        vocab_size=19,
        hidden_size=12,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        layers=(sliding, full, sliding, full),
        embedding_scale=12**0.5,
        logit_softcap=30.0,
    )
    assert parse_model_config(PUBLISHED) == expected


def nested(text):
    """A text model's config as a part of one for images."""
    return {**WRAPPER, "text_config": text}


def test_other_towers():
    towers = {"audio_config": {"model_type": "gemma4_audio"}, "vision_config": None}
    assert parse_model_config({**nested(PUBLISHED), **towers}) == parse_model_config(PUBLISHED)


def test_dense():
    dense = without(PUBLISHED, "enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")
    config = parse_model_config(dense)
    assert {layer.experts for layer in config.layers} == {None}
    assert {layer.mlp_size for layer in config.layers} == {20}
    assert parse_model_config({**PUBLISHED, "enable_moe_block": False}) == config


def test_values_of_their_own():
    own = parse_model_config({**PUBLISHED, "attention_k_eq_v": False})
    assert own.layers[1].num_kv_heads == 2
    assert not own.layers[1].keys_as_values
    assert own.layers[1].head_dim == 16
    assert parse_model_config({**own_heads(), "attention_k_eq_v": False}) == own
    # Keys for values, and no other number of them.
    assert parse_model_config(without(PUBLISHED, "num_global_key_value_heads")).layers[1].num_kv_heads == 2


def own_heads():
    return {**SAVED, "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}}}


def test_embeddings_of_each_layer_are_what_a_file_means_that_says_nothing():
    complaint = (
        "config.json: hidden_size_per_layer_input is absent, which means 256, and that changes the model and "
        "is not supported (per-layer embeddings); supported: 0"
    )
    for raw in (
        without(PUBLISHED, "hidden_size_per_layer_input"),
        {**PUBLISHED, "hidden_size_per_layer_input": None},
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(complaint)}$"):
            parse_model_config(raw)
