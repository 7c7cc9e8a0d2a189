"""Checkpoints whose config is of an older dialect are the goldens, which transformers 5 saved."""

import json
import shutil

import jax
import numpy as np
import pytest

from jetspec_jax import load_target
from tests.families.goldens import FOLDER, NAMES, golden_target
from tests.loading.published import without

FULL, SLIDING = "full_attention", "sliding_attention"
VERSION_4 = {"torch_dtype": "bfloat16", "transformers_version": "4.57.1"}
QWEN3_MOE = (
    ("dtype", "num_local_experts", "rope_parameters"),
    {**VERSION_4, "max_window_layers": 4, "num_experts": 8, "rope_scaling": None, "rope_theta": 500000},
)
PUBLISHED_ROPE = {
    "mrope_interleaved": True,
    "mrope_section": [2, 1, 1],
    "rope_theta": 10000000,
    "rope_type": "default",
}
OF_QWEN3_5 = {
    "attn_output_gate": True,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "output_gate_type": "swish",
}
# Of each golden the keys that its config has in the newer dialect alone, and those of the older one.
OLDER = {
    "gemma3": (
        ("_sliding_window_pattern", "dtype", "layer_types", "rope_parameters", "tie_word_embeddings"),
        {
            **VERSION_4,
            "cache_implementation": "hybrid",
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "rope_theta": 1000000.0,
            "sliding_window_pattern": 6,
        },
    ),
    "gemma4": (("per_layer_config",), {"global_head_dim": 32, "num_global_key_value_heads": 1}),
    "gpt_oss": (
        ("dtype", "rope_parameters", "swiglu_alpha"),
        {
            **VERSION_4,
            "experts_per_token": 2,
            "initial_context_length": 64,
            "rope_scaling": {
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_type": "yarn",
                "truncate": False,
            },
            "rope_theta": 150000,
        },
    ),
    "llama": (
        ("dtype", "rope_parameters"),
        {
            **VERSION_4,
            "_name_or_path": "somewhere",
            "rope_scaling": {
                "factor": 4.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 24,
                "rope_type": "llama3",
            },
            "rope_theta": 500000.0,
        },
    ),
    # As published: they repeat the part of a head that turns.
    "qwen3_5": (
        ("rope_parameters",),
        {"rope_parameters": PUBLISHED_ROPE, "partial_rotary_factor": 0.5, **OF_QWEN3_5},
    ),
    "qwen3_5_moe": (
        ("layer_types", "rope_parameters"),
        {
            "full_attention_interval": 4,
            "mlp_only_layers": [],
            "rope_parameters": PUBLISHED_ROPE,
            "partial_rotary_factor": 0.5,
            **OF_QWEN3_5,
        },
    ),
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_sliding": QWEN3_MOE,
    "qwen3_next": (
        ("dtype", "rope_parameters"),
        {**VERSION_4, "partial_rotary_factor": 0.25, "rope_scaling": None, "rope_theta": 500000},
    ),
    # Never in version 4: as the model's own code has it.
    "step3p7": (
        (
            *("mlp_layer_types", "n_routed_experts", "num_experts_per_tok", "num_key_value_heads"),
            *("num_sliding_attention_heads", "per_layer_config", "rope_parameters"),
        ),
        {
            "attention_other_setting": {"attention_type": SLIDING, "num_attention_heads": 6},
            "moe_layers_enum": "1,2,3",
            "moe_num_experts": 8,
            "moe_top_k": 2,
            "num_attention_groups": 2,
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
            "rope_scaling": {
                "factor": 2.0,
                "high_freq_factor": 32.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 64,
                "rope_type": "llama3",
            },
            "rope_theta": [5000000.0, 10000.0, 10000.0, 5000000.0],
            "yarn_only_types": [FULL],
        },
    ),
}


def in_older_words(raw, newer, older):
    """A config, or that of its text model, with the older keys in place of the newer: it has all of those."""
    if "text_config" in raw:
        return {**raw, "text_config": in_older_words(raw["text_config"], newer, older)}
    assert raw.keys() >= set(newer)
    return without(raw, *newer) | older


def test_every_golden_has_one():
    assert sorted(OLDER) == NAMES


@pytest.mark.parametrize("name", OLDER)
def test_is_the_golden(tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(FOLDER / name, folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(in_older_words(raw, *OLDER[name])))
    ours, golden = load_target(folder, dtype="float32"), golden_target(name)
    assert ours.config == golden.config
    jax.tree.map(np.testing.assert_array_equal, ours.weights, golden.weights)
