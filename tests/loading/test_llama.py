"""Llama, Mistral and Qwen2: published configs, what is refused, and where biases are."""

import pytest

from jetspec_jax.checkpoint.tensor_plan import expected_parameters
from jetspec_jax.config import LayerConfig, ModelConfig, Rope, check_head_fits, parse_model_config
from jetspec_jax.config.draft_head import parse_draft_head_config
from jetspec_jax.config.geometry import Linear, Llama3
from tests.loading.published import HEAD, without

USUAL = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
}
# As published: without a rotary base, a head size or a word on biases.
LLAMA_2_7B = {
    **without(USUAL, "attention_dropout"),
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rope_scaling": None,
    "vocab_size": 32000,
}
LLAMA_3_1_8B = {
    **USUAL,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
LLAMA_3_2_1B = {
    **LLAMA_3_1_8B,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
}
SMOLLM2_135M = {
    **USUAL,
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    "vocab_size": 49152,
}
MISTRAL_7B = {
    **USUAL,
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN2_5_7B = {
    **USUAL,
    "architectures": ["Qwen2ForCausalLM"],
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
ALL = {"llama": SMOLLM2_135M, "mistral": MISTRAL_7B, "qwen2": QWEN2_5_7B}


def layer_of(raw):
    """The geometry that all layers of a config share."""
    [layer] = set(parse_model_config(raw).layers)
    return layer


class TestPublished:
    def test_llama_2(self):
        assert layer_of(LLAMA_2_7B) == LayerConfig(32, 32, 128, Rope(1e4, 128), mlp_size=11008)

    def test_llama_3(self):
        assert layer_of(LLAMA_3_1_8B).rope == Rope(5e5, 128, scaling=Llama3(8.0, 1.0, 4.0, 8192))
        assert layer_of(LLAMA_3_2_1B).rope == Rope(5e5, 64, scaling=Llama3(32.0, 1.0, 4.0, 8192))
        assert parse_model_config(LLAMA_3_2_1B).tie_word_embeddings
        assert parse_model_config(LLAMA_3_1_8B).max_position_embeddings == 131072

    def test_smollm2(self):
        assert parse_model_config(SMOLLM2_135M) == ModelConfig(
            model_type="llama",
            vocab_size=49152,
            hidden_size=576,
            rms_norm_eps=1e-5,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            layers=(LayerConfig(9, 3, 64, Rope(1e5, 64), mlp_size=1536),) * 30,
        )

    def test_mistral(self):
        assert layer_of(MISTRAL_7B) == LayerConfig(32, 8, 128, Rope(1e4, 128), window=4096, mlp_size=14336)
        assert layer_of({**MISTRAL_7B, "sliding_window": None}).window is None
        assert layer_of({**MISTRAL_7B, "head_dim": 160}).head_dim == 160

    def test_qwen2(self):
        assert layer_of(QWEN2_5_7B) == LayerConfig(28, 4, 128, Rope(1e6, 128), qkv_bias=True, mlp_size=18944)
        slides = {**QWEN2_5_7B, "use_sliding_window": True, "max_window_layers": 21}
        assert parse_model_config(slides).windows == (None,) * 21 + (131072,) * 7


def test_linear_scaling():
    linear = {"type": "linear", "factor": 2.0}
    assert layer_of({**LLAMA_2_7B, "rope_scaling": linear}).rope == Rope(1e4, 128, scaling=Linear(2.0))


@pytest.mark.parametrize("raw", ALL.values(), ids=ALL)
def test_harmless_keys(raw):
    more = {
        "_attn_implementation_autoset": True,
        "_from_model_config": True,
        "cls_token_id": None,
        "pretraining_tp": 1,
        "sep_token_id": 3,
        "unk_token_id": 0,
    }
    assert parse_model_config({**raw, **more}) == parse_model_config(raw)


@pytest.mark.parametrize(
    ("raw", "changes", "complaint"),
    [
        *((raw, {"hidden_act": "gelu"}, "hidden_act='gelu' changes") for raw in ALL.values()),
        *((raw, {"pretraining_tp": 2}, "pretraining_tp=2 changes") for raw in ALL.values()),
        *(
            (raw, {"rope_scaling": {"type": kind, "factor": 2.0}}, f"unsupported rope type '{kind}'")
            for raw in ALL.values()
            for kind in ("dynamic", "longrope")
        ),
        *((raw, {"hidden_size": 130}, "without head_dim, hidden_size 130 must be") for raw in ALL.values()),
        *((raw, {"head_dim": 63}, "head_dim 63 is odd") for raw in ALL.values()),
        (SMOLLM2_135M, {"rope_interleaved": True}, "rope_interleaved=True changes"),
        (MISTRAL_7B, {"attention_bias": True}, "attention_bias=True changes"),
        (MISTRAL_7B, {"sliding_window": ...}, "sliding_window must be a number of tokens, or null"),
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, r"layer_types has \['full_attention'\]"),
        (QWEN2_5_7B, {"attention_bias": False}, "attention_bias=False changes"),
        (QWEN2_5_7B, {"use_mrope": True}, "use_mrope=True changes"),
    ],
)
def test_refused(raw, changes, complaint):
    changed = {key: value for key, value in {**raw, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match=f"^config.json: .*{complaint}"):
        parse_model_config(changed)


def names_of(raw):
    """The published names of all tensors that a config asks for."""
    config = parse_model_config({**raw, "num_hidden_layers": 1})
    return {name for own in expected_parameters(config) for key in own.forms[0] for name in key.names}


def biases_of(raw):
    names = {name for name in names_of(raw) if name.endswith(".bias")}
    return {name.removeprefix("model.layers.0.").removesuffix("_proj.bias") for name in names}


def test_biases():
    attention, mlp = {f"self_attn.{x}" for x in "qkvo"}, {"mlp.gate", "mlp.up", "mlp.down"}
    assert biases_of(SMOLLM2_135M) == biases_of(MISTRAL_7B) == set()
    assert biases_of(QWEN2_5_7B) == attention - {"self_attn.o"}
    assert biases_of({**SMOLLM2_135M, "attention_bias": True}) == attention
    assert biases_of({**SMOLLM2_135M, "mlp_bias": True}) == mlp


def test_no_norms_of_queries_and_keys():
    assert not {
        name for raw in ALL.values() for name in names_of(raw) if "q_norm" in name or "k_norm" in name
    }


def test_a_draft_head_fits():
    """A head's own layers are Qwen3's, whatever its target is."""
    head = parse_draft_head_config({**HEAD, "hidden_size": 576, "vocab_size": 49152, "num_target_layers": 30})
    check_head_fits(head, parse_model_config(SMOLLM2_135M))
