import dataclasses
import json
import math

import jax
import numpy as np
import pytest

from bench.common import shapes
from jetspec_jax import load_target, logits
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import Experts, Rope, parse_model_config
from jetspec_jax.config.geometry import Yarn
from jetspec_jax.inspect.describe import describe
from jetspec_jax.models import kept_packed, quantized_blocks
from jetspec_jax.models.mxfp4 import widen, without_mxfp4
from jetspec_jax.models.quantized import widened
from pallas_kernels.activation import Activation
from pallas_kernels.expert_choice import RouterRule
from tests.loading.published import random_tensors, without, write

# What openai/gpt-oss-20b publishes: the benchmarks' shape, and keys that change nothing or repeat others.
GPT_OSS_20B = {
    **shapes.GPT_OSS_20B,
    "architectures": ["GptOssForCausalLM"],
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "output_router_logits": False,
    "pad_token_id": 199999,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "router_aux_loss_coef": 0.9,
    "transformers_version": "4.55.0.dev0",
    "use_cache": True,
}
# The same as transformers 5 writes it.
NEWER = {
    **without(
        GPT_OSS_20B, "experts_per_token", "initial_context_length", "quantization_config", "rope_scaling"
    ),
    "bos_token_id": None,
    "dtype": "bfloat16",
    "rope_parameters": {**GPT_OSS_20B["rope_scaling"], "rope_theta": 150000.0},
    "swiglu_alpha": 1.702,
    "transformers_version": "5.23.0",
}
del NEWER["rope_theta"]

TINY = {
    **GPT_OSS_20B,
    "eos_token_id": 3,
    "head_dim": 8,
    "hidden_size": 64,
    "intermediate_size": 32,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "experts_per_token": 2,
    "sliding_window": 8,
    "vocab_size": 64,
}


class TestConfig:
    def test_published(self):
        config = parse_model_config(GPT_OSS_20B)
        assert config.windows == (128, None) * 12
        assert not config.tie_word_embeddings
        layer = config.layers[0]
        assert (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.mlp_size) == (64, 8, 64, 0)
        assert layer.experts == Experts(32, 2880, RouterRule(4), Activation.gpt_oss(), biases=True)
        factor = 0.1 * math.log(32) + 1
        assert layer.rope == Rope(150000.0, 64, scaling=Yarn(32.0, 32.0, 1.0, 4096, False, factor))

    @pytest.mark.parametrize("rope", [{}, {"rope_scaling": None}, {"rope_scaling": {}}, {"rope_theta": 15e4}])
    def test_a_file_without_rope_is_stretched(self, rope):
        raw = {**without(GPT_OSS_20B, "rope_scaling", "rope_theta"), **rope}
        assert parse_model_config(raw) == parse_model_config(GPT_OSS_20B)
        # The base is read even so.
        assert parse_model_config({**raw, "rope_theta": 2e5}).layers[0].rope == dataclasses.replace(
            parse_model_config(GPT_OSS_20B).layers[0].rope, theta=2e5
        )

    @pytest.mark.parametrize(
        "rope",
        [{"rope_parameters": {}}, {"rope_scaling": {"rope_type": "default"}}],
    )
    def test_only_a_file_that_says_so_is_not_stretched(self, rope):
        raw = {**without(GPT_OSS_20B, "rope_scaling", "rope_theta"), **rope}
        assert parse_model_config(raw).layers[0].rope == Rope(150000.0, 64)

    def test_what_is_read(self):
        raw = {
            **GPT_OSS_20B,
            "swiglu_limit": 5.0,
            "swiglu_alpha": 2.0,
            "layer_types": ["full_attention"] * 24,
        }
        config = parse_model_config({**raw, "sliding_window": None})
        assert config.layers[3].experts.activation == Activation.gpt_oss(5.0, 2.0)
        assert config.windows == (None,) * 24


def other_tensors():
    """All tensors but the experts' matrices, by hand from the published layout."""
    m, h, g, e, i, n = 64, 4, 2, 8, 32, 5
    shapes = {"model.embed_tokens.weight": (64, m), "model.norm.weight": (m,), "lm_head.weight": (64, m)}
    for layer in range(2):
        own = {
            "self_attn.q_proj.weight": (h * e, m),
            "self_attn.q_proj.bias": (h * e,),
            "self_attn.k_proj.weight": (g * e, m),
            "self_attn.k_proj.bias": (g * e,),
            "self_attn.v_proj.weight": (g * e, m),
            "self_attn.v_proj.bias": (g * e,),
            "self_attn.o_proj.weight": (m, h * e),
            "self_attn.o_proj.bias": (m,),
            "self_attn.sinks": (h,),
            "mlp.router.weight": (n, m),
            "mlp.router.bias": (n,),
            "mlp.experts.gate_up_proj_bias": (n, 2 * i),
            "mlp.experts.down_proj_bias": (n, m),
            "input_layernorm.weight": (m,),
            "post_attention_layernorm.weight": (m,),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return random_tensors(shapes)


def packed_experts():
    """The experts' matrices in blocks of random values and their scales, around 1/16."""
    rng, tensors = np.random.default_rng(1), {}
    for layer in range(2):
        for name, rows, blocks in (("gate_up_proj", 2 * 32, 64 // 32), ("down_proj", 64, 32 // 32)):
            path = f"model.layers.{layer}.mlp.experts.{name}"
            tensors[f"{path}_blocks"] = rng.integers(256, size=(5, rows, blocks, 16), dtype=np.uint8)
            tensors[f"{path}_scales"] = rng.integers(122, 125, size=(5, rows, blocks), dtype=np.uint8)
    return tensors


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt_oss") / "packed"
    return write(folder, TINY, other_tensors() | packed_experts())


def same_bits(a, b):
    return np.asarray(a).tobytes() == np.asarray(b).tobytes()


class TestMxfp4:
    def test_is_the_widened_model(self, tmp_path, packed):
        tensors, experts = other_tensors(), packed_experts()
        for name in [name.removesuffix("_blocks") for name in experts if name.endswith("_blocks")]:
            # As transformers writes them: the input's axis first.
            wide = widen(experts[f"{name}_blocks"], experts[f"{name}_scales"])
            tensors[name] = np.ascontiguousarray(wide.swapaxes(1, 2))
        raw = without(TINY, "quantization_config")
        wide = load_target(write(tmp_path / "wide", raw, tensors), dtype="float32")
        target = load_target(packed, dtype="float32")
        assert target.config == wide.config
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), target.weights, wide.weights))
        ids = np.random.default_rng(0).integers(0, 64, (2, 20))
        out = np.asarray(logits(target, ids))
        assert out.std() > 0.5
        np.testing.assert_array_equal(out, logits(wide, ids))
        # Kept packed, each product widens the same values; sums may be in another order.
        kept = load_target(packed, dtype="float32", mxfp4="packed")
        assert kept.config == kept_packed(wide.config)
        flat = widened(kept.weights, quantized_blocks(kept.config))
        assert jax.tree.all(jax.tree.map(same_bits, flat, target.weights))
        np.testing.assert_allclose(logits(kept, ids), out, rtol=0, atol=1e-5 * np.abs(out).max())

    def test_what_is_written_does_not_say_that_it_is_packed(self, tmp_path, packed):
        target = load_target(packed, dtype="float32")
        save_checkpoint(tmp_path / "ours", TINY, target.weights, dtype="float32")
        raw = json.loads((tmp_path / "ours" / "config.json").read_text())
        assert raw == without(TINY, "quantization_config")
        again = load_target(tmp_path / "ours", dtype="float32")
        assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), target.weights, again.weights))

    @pytest.mark.parametrize("raw", [{}, {"quantization_config": None}, {"quantization_config": {"bits": 8}}])
    def test_no_other_entry_is_taken_away(self, raw):
        assert without_mxfp4({**raw, "zoom": 2}) == {**raw, "zoom": 2}

    def test_bytes_in_the_file_and_widened(self, packed):
        about = describe(packed)
        experts = 2 * 5 * (64 * 64 + 32 * 64)  # values
        assert about["weight_bytes_bf16"] == 2 * about["parameters"]
        others = about["parameters"] - experts
        # Half a byte each and a byte for 32; the rest of this file is float32.
        expected = experts * 17 // 32 + 4 * others
        assert expected < about["file_bytes"] < expected + 10_000
        assert about["weight_bytes_mxfp4"] == experts * 17 // 32 + 2 * others
        assert about["quantization"] == "MXFP4"
