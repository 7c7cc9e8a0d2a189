"""Configs of Gemma 3: both dialects, alone or below another model's, and what is refused."""

import pytest

from jetspec_jax.config import LayerConfig, ModelConfig, Rope, parse_model_config
from jetspec_jax.config.geometry import Linear
from pallas_kernels.activation import GELU_TANH
from tests.loading.published import without

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


def test_both_dialects():
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
    assert parse_model_config(OLDER) == parse_model_config(NEWER) == expected


@pytest.mark.parametrize("text", [OLDER, NEWER])
def test_below_the_config_of_a_model_of_images(text):
    assert parse_model_config(nested(text)) == parse_model_config(text)
    assert parse_model_config(nested(without(text, "model_type"))) == parse_model_config(text)


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
    with pytest.raises(ValueError, match="final_logit_softcapping must be a positive number"):
        parse_model_config({**OLDER, "final_logit_softcapping": 0})


@pytest.mark.parametrize("raw", [OLDER, nested(OLDER)], ids=["alone", "nested"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("use_bidirectional_attention", True),
        ("hidden_activation", "gelu"),
        ("attention_bias", True),
    ],
)
def test_changed_maths(raw, key, value):
    where, text = ("text_config: ", raw["text_config"]) if "text_config" in raw else ("", raw)
    changed = {**text, key: value}
    with pytest.raises(ValueError, match=f"config.json: {where}{key}={value!r} changes the model"):
        parse_model_config(nested(changed) if where else changed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "unsupported rope type 'yarn'"),
        ({"sliding_window": None}, "sliding_window must be an integer"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        parse_model_config({**OLDER, **changes})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({}, "rope_parameters has no full_attention"),
        ({"full_attention": {"rope_theta": 1e6}}, "rope_parameters has no sliding_attention"),
        ({"full_attention": {}, "sliding_attention": {}}, "full_attention: rope_theta must be a positive"),
        ({**NEWER["rope_parameters"], "chunked": {}}, r"rope_parameters: unknown keys \['chunked'\]"),
        ({"rope_theta": 1e6, "rope_type": "default"}, "rope_parameters has no full_attention"),
    ],
)
def test_rotary_embeddings_that_are_not_whole(rope, message):
    with pytest.raises(ValueError, match=message):
        parse_model_config({**NEWER, "rope_parameters": rope})


def test_both_dialects_in_one_file():
    keys = {key: OLDER[key] for key in ("rope_theta", "rope_local_base_freq", "rope_scaling")}
    for agreeing in (keys, *({key: value} for key, value in keys.items()), {"rope_scaling": None}):
        assert parse_model_config({**NEWER, **agreeing}) == parse_model_config(NEWER)


@pytest.mark.parametrize(
    "other",
    [
        {"rope_theta": 1e6},
        {"rope_local_base_freq": 1e4},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "default"}},
        {"rope_theta": 500000.0, "rope_local_base_freq": 1e4},
    ],
)
def test_dialects_that_differ(other):
    with pytest.raises(
        ValueError, match=f"^config.json: rope_parameters and {', '.join(other)} mean the same and differ"
    ):
        parse_model_config({**NEWER, **other})


def test_a_base_that_is_given_twice():
    scaling = {**OLDER["rope_scaling"], "rope_theta": 1e6}
    with pytest.raises(
        ValueError, match=r"rope_scaling: rope_theta is given twice and differs: 1000000\.0, 5"
    ):
        parse_model_config({**OLDER, "rope_scaling": scaling})
    scaling["rope_theta"] = OLDER["rope_theta"]
    assert parse_model_config({**OLDER, "rope_scaling": scaling}) == parse_model_config(OLDER)


class TestWrapper:
    def test_no_text(self):
        with pytest.raises(ValueError, match=r"config.json: text_config must be an object, not None"):
            parse_model_config(without(PUBLISHED_4B, "text_config"))

    def test_another_text_model(self):
        with pytest.raises(ValueError, match="text_config: model_type must be 'gemma3_text', not 'qwen3'"):
            parse_model_config(nested({**OLDER, "model_type": "qwen3"}))

    def test_unknown_keys(self):
        raw = {**nested({**OLDER, "zoom": 2}), "focus": 3}
        with pytest.raises(ValueError, match=r"config.json: text_config: unknown keys \['zoom'\]"):
            parse_model_config(raw)
        with pytest.raises(ValueError, match=r"config.json: unknown keys \['focus'\]"):
            parse_model_config(raw, ignore_config_keys=["zoom"])
        parse_model_config(raw, ignore_config_keys=["zoom", "focus"])

    def test_quantised(self):
        with pytest.raises(ValueError, match=r"config.json: quantization_config="):
            parse_model_config({**PUBLISHED_4B, "quantization_config": {"quant_method": "fp8"}})

    def test_tied_and_not(self):
        with pytest.raises(ValueError, match=r"config.json: tie_word_embeddings=False .* supported: True"):
            parse_model_config({**PUBLISHED_4B, "tie_word_embeddings": False})
