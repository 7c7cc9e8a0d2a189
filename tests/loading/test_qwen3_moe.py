"""Qwen3-MoE: configs of both dialects, what is refused, and experts one by one or fused."""

import numpy as np
import pytest

from bench.common import shapes
from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.config import Experts, LayerConfig, ModelConfig, Rope, parse_model_config
from pallas_kernels.expert_choice import RouterRule
from tests.loading.families import EXPERTS, fused, one_by_one, random_experts
from tests.loading.published import layer_shapes, random_tensors, without, write

# What Qwen/Qwen3-30B-A3B publishes: the benchmarks' shape, and keys that change nothing.
QWEN3_30B_A3B = {
    **shapes.QWEN3_30B_A3B,
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "initializer_range": 0.02,
    "max_window_layers": 48,
    "output_router_logits": False,
    "rope_scaling": None,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
}
# A tiny one, unlike it: every second layer dense, a window, weights that do not add up to one.
OLDER = {
    **QWEN3_30B_A3B,
    "bos_token_id": 1,
    "decoder_sparse_step": 2,
    "eos_token_id": 2,
    "head_dim": 8,
    "hidden_size": 12,
    "intermediate_size": 20,
    "max_position_embeddings": 128,
    "max_window_layers": 5,
    "moe_intermediate_size": 5,
    "norm_topk_prob": False,
    "num_attention_heads": 4,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "rope_theta": 500000,
    "sliding_window": 16,
    "use_sliding_window": True,
    "vocab_size": 19,
}
# The same as transformers 5 writes it.
NEWER = {
    **without(OLDER, "max_window_layers", "num_experts", "rope_scaling", "rope_theta", "torch_dtype"),
    "dtype": "bfloat16",
    "num_local_experts": EXPERTS,
    "pad_token_id": None,
    "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
    "transformers_version": "5.23.0",
}


def routed_layers(raw):
    """The layers that have experts; all others have a dense block of 20 features."""
    config = parse_model_config(raw)
    assert all((layer.experts is None) == (layer.mlp_size == 20) for layer in config.layers)
    return [i for i, layer in enumerate(config.layers) if layer.experts]


class TestConfig:
    def test_published(self):
        config = parse_model_config(QWEN3_30B_A3B)
        layer = LayerConfig(
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            rope=Rope(1e6, 128),
            experts=Experts(128, 768, RouterRule(8, renormalise=True)),
        )
        assert config.layers == (layer,) * 48
        assert not config.tie_word_embeddings

    def test_what_is_read(self):
        shared = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "rope": Rope(5e5, 8), "window": 16}
        dense = LayerConfig(**shared, mlp_size=20)
        routed = LayerConfig(**shared, experts=Experts(EXPERTS, 5, RouterRule(2, renormalise=False)))
        expected = ModelConfig(
            model_type="qwen3_moe",
            vocab_size=19,
            hidden_size=12,
            rms_norm_eps=1e-6,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            layers=(dense, routed, dense, routed, dense),
        )
        assert parse_model_config(OLDER) == expected

    @pytest.mark.parametrize(
        ("said", "renormalise"),
        [({}, False), ({"norm_topk_prob": None}, False), ({"norm_topk_prob": True}, True)],
    )
    def test_weights_that_add_up_to_one(self, said, renormalise):
        config = parse_model_config(without(OLDER, "norm_topk_prob") | said)
        assert config.layers[1].experts.routing.renormalise is renormalise

    @pytest.mark.parametrize(
        ("said", "routed"),
        [
            ({}, [0, 1, 2, 3, 4]),
            ({"mlp_only_layers": None}, [0, 1, 2, 3, 4]),
            ({"mlp_only_layers": [0, 3]}, [1, 2, 4]),
            ({"decoder_sparse_step": 2}, [1, 3]),
            ({"decoder_sparse_step": 3, "mlp_only_layers": []}, [2]),
            ({"decoder_sparse_step": 2, "mlp_only_layers": [3, 4]}, [1]),
            ({"decoder_sparse_step": 6}, []),
        ],
    )
    def test_layers_with_experts(self, said, routed):
        assert routed_layers(without(OLDER, "decoder_sparse_step", "mlp_only_layers") | said) == routed

    def test_no_dense_size_where_no_layer_is_dense(self):
        raw = {**without(OLDER, "intermediate_size"), "decoder_sparse_step": 1}
        assert routed_layers(raw) == [0, 1, 2, 3, 4]
        with pytest.raises(ValueError, match="intermediate_size must be an integer of at least 1, not None"):
            parse_model_config({**raw, "mlp_only_layers": [2]})

    @pytest.mark.parametrize(
        ("said", "window"),
        [
            # All layers slide, whatever `max_window_layers` says, or none does.
            ({"max_window_layers": 3}, 16),
            ({"use_sliding_window": False}, None),
            ({"use_sliding_window": None}, None),
            ({"use_sliding_window": False, "sliding_window": None}, None),
        ],
    )
    def test_windows(self, said, window):
        assert parse_model_config({**OLDER, **said}).windows == (window,) * 5


# Its experts are in all layers but the first.
MIXED = {**OLDER, "decoder_sparse_step": 1, "mlp_only_layers": [0], "num_hidden_layers": 3}
CONFIG = parse_model_config(MIXED)


def other_tensors():
    """All tensors but the experts' and the two ends: Qwen3's, with a router where a layer has experts."""
    dense = layer_shapes("model.", MIXED).items()
    own = {name: shape for name, shape in dense if "mlp" not in name or "layers.0." in name}
    own |= {f"model.layers.{i}.mlp.gate.weight": (EXPERTS, MIXED["hidden_size"]) for i in (1, 2)}
    return random_tensors({**own, "model.norm.weight": (MIXED["hidden_size"],)})


@pytest.fixture
def experts():
    return random_experts({**MIXED, "intermediate_size": MIXED["moe_intermediate_size"]})


def published(form, experts):
    """A whole checkpoint's tensors, its experts in one of the two forms."""
    tensors = form(*experts).items()
    return other_tensors() | {name: tensor for name, tensor in tensors if "layers.0.mlp" not in name}


class TestCheckpoint:
    @pytest.mark.parametrize("form", [one_by_one, fused])
    def test_what_is_where(self, tmp_path, experts, form):
        weights = read_weights(write(tmp_path / "it", MIXED, published(form, experts)), CONFIG)
        gate, up, down, _ = experts
        for layer in (1, 2):
            held = weights["layers"][layer]["mlp"]
            router = other_tensors()[f"model.layers.{layer}.mlp.gate.weight"]
            np.testing.assert_array_equal(held["router"], router)
            for expert in range(EXPERTS):
                gate_up = held["experts"]["gate_up_proj"][expert]
                np.testing.assert_array_equal(gate_up[:, 0], gate[layer, expert].T)
                np.testing.assert_array_equal(gate_up[:, 1], up[layer, expert].T)
                np.testing.assert_array_equal(held["experts"]["down_proj"][expert], down[layer, expert].T)
        dense = weights["layers"][0]["mlp"]
        assert dense.keys() == {"gate_up_proj", "down_proj"}
        assert dense["gate_up_proj"].shape == (12, 2, 20)

    def test_fused_matrices_of_another_order(self, tmp_path, experts):
        """Input first, as GPT-OSS has them: refused by its shape, not read as something else."""
        tensors = published(fused, experts)
        name = "model.layers.1.mlp.experts.gate_up_proj"
        tensors[name] = np.ascontiguousarray(tensors[name].swapaxes(1, 2))
        with pytest.raises(ValueError, match=rf"misshapen: {name} is \[3, 12, 10\], expected \[3, 10, 12\]"):
            read_weights(write(tmp_path / "it", MIXED, tensors), CONFIG)
