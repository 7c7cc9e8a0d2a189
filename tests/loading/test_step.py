import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jetspec_jax.checkpoint.reading import read_headers, read_weights
from jetspec_jax.config import Experts, Rope, parse_eos_token_ids, parse_model_config
from jetspec_jax.config.geometry import Llama3
from pallas_kernels.activation import SILU, Activation
from pallas_kernels.expert_choice import RouterRule
from tests.families.goldens import FOLDER
from tests.loading.published import without, write

FULL, SLIDING = "full_attention", "sliding_attention"

# What the hub has for stepfun-ai/Step-3.7-Flash: 45 layers, and 3 that predict further tokens.
HUB_TEXT = {
    "architectures": ["Step3p5ForCausalLM"],
    "att_impl_type": "GQA",
    "attention_other_setting": {
        "attention_type": SLIDING,
        "head_dim": 128,
        "num_attention_groups": 8,
        "num_attention_heads": 96,
        "true_head_dim": 128,
    },
    "eos_token_id": [1, 2, 128007],
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 11264,
    "layer_types": [FULL, SLIDING, SLIDING, SLIDING] * 12,
    "max_position_embeddings": 262144,
    "max_seq_len": 262144,
    "model_type": "step3p5",
    "moe_every_n_layer": 1,
    "moe_intermediate_size": 1280,
    "moe_layer_offset": 0,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
    "moe_num_experts": 288,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 3.0,
    "moe_top_k": 8,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "num_attention_groups": 8,
    "num_attention_heads": 64,
    "num_hidden_layers": 45,
    "num_nextn_predict_layers": 3,
    "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 12,
    "rope_scaling": {
        "factor": 2.0,
        "high_freq_factor": 32.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 131072,
        "rope_type": "llama3",
    },
    "rope_theta": [5000000.0, 10000.0, 10000.0, 10000.0] * 12,
    "share_expert_dim": 1280,
    "sink": False,
    "sliding_window": 512,
    "swiglu_limits": [0.0] * 43 + [7.0, 7.0, 0.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0] * 44 + [16.0, 0.0, 0.0, 0.0],
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_head_wise_attn_gate": True,
    "use_moe": True,
    "use_moe_router_bias": True,
    "use_qk_norm": False,
    "use_rope_layers": [],
    "vocab_size": 128896,
    "yarn_only_types": [FULL],
    "zero_centered": True,
}
# The same as transformers 5 writes it.
NEWER_TEXT = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": [1, 2, 128007],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11264,
    "layer_types": HUB_TEXT["layer_types"][:45],
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 42,
    "model_type": "step3p5",
    "moe_intermediate_size": 1280,
    "moe_router_scaling_factor": 3.0,
    "mtp_layer_types": [SLIDING] * 3,
    "mtp_mlp_layer_types": ["dense"] * 3,
    "n_routed_experts": 288,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 45,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 3,
    "num_sliding_attention_heads": 96,
    "output_router_logits": False,
    "pad_token_id": 1,
    "per_layer_config": {f"{layer:02}": {"num_attention_heads": 96} for layer in range(45) if layer % 4},
    "query_pre_attn_scalar": 128,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        FULL: {**HUB_TEXT["rope_scaling"], "partial_rotary_factor": 0.5, "rope_theta": 5000000.0},
        SLIDING: {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
    },
    "share_expert_dim": 1280,
    "sliding_window": 512,
    "swiglu_limits": HUB_TEXT["swiglu_limits"][:45],
    "swiglu_limits_shared": HUB_TEXT["swiglu_limits_shared"][:45],
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 128896,
}
PUBLISHED = parse_model_config(HUB_TEXT)


def wrapped(text):
    return {
        "architectures": ["Step3p7ForConditionalGeneration"],
        "image_token_id": 128001,
        "model_type": "step3p7",
        "projector_bias": False,
        "text_config": text,
        "vision_config": {"width": 1536},
    }


class TestConfig:
    def test_published(self):
        assert PUBLISHED.num_layers == 45
        assert PUBLISHED.windows == (None, 512, 512, 512) * 11 + (None,)
        assert (PUBLISHED.rms_norm_eps, PUBLISHED.further_layers) == (1e-5, 3)
        full, sliding, last = (PUBLISHED.layers[i] for i in (0, 1, 44))
        assert (full.num_heads, sliding.num_heads, full.num_kv_heads, full.head_dim) == (64, 96, 8, 128)
        assert full.rope == Rope(5e6, 64, scaling=Llama3(2.0, 1.0, 32.0, 131072))
        assert sliding.rope == Rope(1e4, 128)
        assert (full.mlp_size, full.experts, full.activation) == (11264, None, SILU)
        routing = RouterRule(8, scores="sigmoid", scale=3.0)
        assert PUBLISHED.layers[3].experts == Experts(288, 1280, routing)
        assert last.experts == Experts(288, 1280, routing, Activation.step(7.0))
        assert (last.mlp_size, last.activation) == (1280, Activation.step(16.0))
        assert PUBLISHED.layers[43].activation == SILU

    def test_lists_without_further_layers(self):
        """transformers trims the lists of a file, and other files never had the surplus."""
        lists = {
            key: value[:45] for key, value in HUB_TEXT.items() if isinstance(value, list) and len(value) == 48
        }
        assert set(lists) == {
            "layer_types",
            "partial_rotary_factors",
            "rope_theta",
            "swiglu_limits",
            "swiglu_limits_shared",
        }
        assert parse_model_config({**HUB_TEXT, **lists}) == PUBLISHED

    def test_further_layers(self):
        none = parse_model_config(without(NEWER_TEXT, "num_nextn_predict_layers"))
        assert none == dataclasses.replace(PUBLISHED, further_layers=0)

    def test_no_limits(self):
        for raw in (
            without(HUB_TEXT, "swiglu_limits", "swiglu_limits_shared"),
            {**HUB_TEXT, "swiglu_limits": [None] * 45, "swiglu_limits_shared": [0] * 48},
        ):
            layers = parse_model_config(raw).layers
            assert {layer.activation for layer in layers} == {SILU}
            assert {layer.experts.activation for layer in layers if layer.experts} == {SILU}

    def test_no_other_heads(self):
        config = parse_model_config(without(HUB_TEXT, "attention_other_setting"))
        assert {layer.num_heads for layer in config.layers} == {64}

    def test_end_of_sequence(self):
        assert parse_eos_token_ids(wrapped(HUB_TEXT), None) == (1, 2, 128007)


class TestCheckpoint:
    def test_other_tensors_are_left_out(self, tmp_path):
        """Layers that predict further tokens, as many as the config says, and what sees."""
        golden = FOLDER / "step3p7"
        none = json.loads((golden / "config.json").read_text())
        raw = {**none, "text_config": {**none["text_config"], "num_nextn_predict_layers": 1}}
        tensors = load_file(golden / "model.safetensors")
        further = {
            name.replace("layers.1.", "layers.4."): value
            for name, value in tensors.items()
            if name.startswith("model.layers.1.self_attn")
        } | {"model.layers.4.eh_proj.weight": np.zeros((4, 4), np.float32)}
        folder = write(tmp_path / "it", raw, tensors | further)
        config = parse_model_config(raw)
        counts = {reason: len(names) for reason, names in read_headers(folder).plan(config).unused.items()}
        assert counts == {
            "layers that predict further tokens": 8,
            "vision tower": sum(name.startswith("vision_model.") for name in tensors),
            "projector of images": 1,
        }
        with pytest.raises(ValueError, match=r"surplus: model\.layers\.4\.eh_proj\.weight"):
            read_weights(folder, parse_model_config(none))
