"""Qwen3.5 and Qwen3-Next: published configs, and where files keep what."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jetspec_jax import load_target
from jetspec_jax.checkpoint.orbax import read_orbax_weights
from jetspec_jax.checkpoint.reading import read_headers, read_weights
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import Experts, LayerConfig, Recurrence, Rope, parse_model_config
from jetspec_jax.device.memory import num_parameters, weight_bytes
from jetspec_jax.models import build, dtype_of, weights_of
from pallas_kernels.expert_choice import RouterRule
from tests.families.goldens import FOLDER
from tests.loading.published import without, write

FULL, RECURRENT = "full_attention", "linear_attention"

# What the hub has for the text model of Qwen/Qwen3.6-35B-A3B.
TEXT_35B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 248044,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "layer_types": [RECURRENT, RECURRENT, RECURRENT, FULL] * 10,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 512,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 16,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
}
EXPERTS = ("moe_intermediate_size", "num_experts", "num_experts_per_tok", "shared_expert_intermediate_size")
# And for that of Qwen/Qwen3.6-27B.
TEXT_27B = {
    **without(TEXT_35B, *EXPERTS, "output_router_logits", "router_aux_loss_coef"),
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "layer_types": [RECURRENT, RECURRENT, RECURRENT, FULL] * 16,
    "linear_num_value_heads": 48,
    "model_type": "qwen3_5_text",
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "output_gate_type": "swish",
}
# For Qwen/Qwen3-Next-80B-A3B-Instruct.
NEXT_80B = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LAYERS = [RECURRENT, RECURRENT, RECURRENT, FULL]
ROPE = TEXT_35B["rope_parameters"]


def wrapped(text):
    return {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "image_token_id": 248056,
        "language_model_only": False,
        "model_type": text["model_type"].removesuffix("_text"),
        "text_config": text,
        "video_token_id": 248057,
        "vision_config": {"depth": 27},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    }


class TestConfig:
    def test_published_mixture(self):
        config = parse_model_config(TEXT_35B)
        rope, experts = Rope(1e7, 64), Experts(256, 512, RouterRule(8, renormalise=True))
        recurrence = Recurrence(16, 32, 128, 128, 4)
        block = {"rope": rope, "mlp_size": 512, "experts": experts}
        recurrent = LayerConfig(num_heads=0, num_kv_heads=0, head_dim=0, recurrence=recurrence, **block)
        full = LayerConfig(num_heads=16, num_kv_heads=2, head_dim=256, **block)
        assert config.layers == (recurrent, recurrent, recurrent, full) * 10
        assert (recurrence.channels, recurrence.slot_bytes(2)) == (8192, 4 * 32 * 128 * 128 + 2 * 3 * 8192)
        assert sum(layer.kv_size for layer in config.layers) * 2 == 20 * 1024
        # What the model is called after, without the head that predicts further tokens.
        assert round(num_parameters(config) / 1e9, 2) == 34.66

    def test_published_dense(self):
        layers = parse_model_config(TEXT_27B).layers
        assert {layer.mlp_size for layer in layers} == {17408}
        assert {layer.recurrence for layer in layers} == {None, Recurrence(16, 48, 128, 128, 4)}
        assert [i for i, layer in enumerate(layers) if layer.recurrence is None] == [*range(3, 64, 4)]

    def test_published_next(self):
        config = parse_model_config(NEXT_80B)
        assert [layer.recurrence is None for layer in config.layers] == [False, False, False, True] * 12
        experts = Experts(512, 512, RouterRule(10, renormalise=True))
        assert {layer.experts for layer in config.layers} == {experts}
        plain = parse_model_config({**NEXT_80B, "norm_topk_prob": False})
        assert plain.layers[0].experts.routing == RouterRule(10, renormalise=False)

    @pytest.mark.parametrize("raw", [TEXT_35B, NEXT_80B], ids=["qwen3_5_moe", "qwen3_next"])
    def test_dense_layers_of_a_mixture(self, raw):
        layers = parse_model_config({**raw, "mlp_only_layers": [0, 5], "intermediate_size": 40}).layers
        assert [i for i, layer in enumerate(layers) if layer.experts is None] == [0, 5]
        assert (layers[0].mlp_size, layers[1].mlp_size) == (40, 512)
        with pytest.raises(ValueError, match="intermediate_size must be an integer"):
            parse_model_config({**raw, "mlp_only_layers": [0], "intermediate_size": None})

    def test_an_interval_alone(self):
        raw = {**without(TEXT_35B, "layer_types"), "full_attention_interval": 3}
        kinds = [layer.recurrence is None for layer in parse_model_config(raw).layers]
        assert [i for i, full in enumerate(kinds) if full] == [*range(2, 40, 3)]

    def test_layers_in_any_order(self):
        raw = {**without(TEXT_35B, "full_attention_interval"), "layer_types": [FULL, RECURRENT] * 20}
        kinds = [layer.recurrence is None for layer in parse_model_config(raw).layers]
        assert kinds == [True, False] * 20


def same_models():
    """Configs, and how else the same models are described."""
    rope = without(ROPE, "partial_rotary_factor")
    older = {**without(TEXT_35B, "rope_parameters"), "rope_theta": 1e7, "rope_scaling": rope}
    return {
        "qwen3_5_moe": (
            TEXT_35B,
            [
                without(TEXT_35B, "layer_types"),
                without(TEXT_35B, "full_attention_interval"),
                without(TEXT_35B, "layer_types", "full_attention_interval"),
                without(TEXT_35B, "partial_rotary_factor"),
                {**TEXT_35B, "rope_parameters": rope},
                without({**TEXT_35B, "rope_parameters": rope}, "partial_rotary_factor"),
                older,
                {**older, "rope_scaling": None},
                {**TEXT_35B, "output_gate_type": "silu", "norm_topk_prob": True},
                without(TEXT_35B, "attn_output_gate", "mamba_ssm_dtype", "mlp_only_layers"),
            ],
        ),
        "qwen3_5": (TEXT_27B, [without(TEXT_27B, "output_gate_type")]),
        "qwen3_next": (
            NEXT_80B,
            [
                {**without(NEXT_80B, "rope_theta", "rope_scaling"), "rope_parameters": {"rope_theta": 1e7}},
                without(NEXT_80B, "partial_rotary_factor", "norm_topk_prob"),
                without(NEXT_80B, "intermediate_size"),
            ],
        ),
    }


#: Settings that change the model.
CHANGES = [
    *(
        (raw, key, value)
        for raw in (TEXT_35B, TEXT_27B, NEXT_80B)
        for key, value in (
            ("attn_output_gate", False),
            ("output_gate_type", "sigmoid"),
            ("hidden_act", "gelu"),
            ("attention_bias", True),
            ("mamba_ssm_dtype", "bfloat16"),
        )
    ),
    (TEXT_35B, "norm_topk_prob", False),
    (TEXT_35B, "decoder_sparse_step", 2),
    (NEXT_80B, "use_sliding_window", True),
]
#: What is refused, by what of the message names it.
REFUSED = [
    *(
        (
            raw,
            {
                "4 layer_types for": {"layer_types": LAYERS},
                r"unsupported layer types \['sliding_attention'\] in layer_types": {
                    "layer_types": [*[FULL] * (raw["num_hidden_layers"] - 1), "sliding_attention"]
                },
                "layer_types and full_attention_interval 4 differ": {
                    "layer_types": [FULL] * raw["num_hidden_layers"],
                },
                "full_attention_interval must be an integer of at least 1": {"full_attention_interval": 0},
                "linear_num_value_heads 40 is no multiple of linear_num_key_heads 16": {
                    "linear_num_value_heads": 40
                },
                "linear_conv_kernel_dim must be at most 64": {"linear_conv_kernel_dim": 65},
                "partial_rotary_factor is given twice and differs": {
                    "partial_rotary_factor": 0.25,
                    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5},
                },
                "partial_rotary_factor=0.35 makes 89 of 256": {
                    "partial_rotary_factor": 0.35,
                    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.35},
                },
            },
        )
        for raw in (TEXT_35B, TEXT_27B, NEXT_80B)
    ),
    *(
        (
            raw,
            {
                "num_experts_per_tok 600 of": {"num_experts_per_tok": 600},
                "shared_expert_intermediate_size must be an integer": {
                    "shared_expert_intermediate_size": None
                },
            },
        )
        for raw in (TEXT_35B, NEXT_80B)
    ),
    (TEXT_27B, {r"unknown keys \['num_experts'\]": {"num_experts": 8}}),
]

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def golden(name):
    """A golden's config as it is stored, and its tensors."""
    raw = json.loads((FOLDER / name / "config.json").read_text())
    return raw, load_file(FOLDER / name / "model.safetensors")


def fused(tensors, count=8):
    """Experts in two tensors for each layer, as the hub has them."""
    one_by_one = re.compile(r"(.*\.experts\.)\d+\.gate_proj\.weight")
    found = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for prefix in sorted({match[1] for name in tensors if (match := one_by_one.fullmatch(name))}):
        gate, up, down = (
            np.stack([tensors[f"{prefix}{i}.{name}_proj.weight"] for i in range(count)])
            for name in ("gate", "up", "down")
        )
        found |= {f"{prefix}gate_up_proj": np.concatenate([gate, up], axis=1), f"{prefix}down_proj": down}
    return found


class TestCheckpoint:
    @pytest.mark.parametrize("name", NAMES)
    def test_as_published(self, tmp_path, name):
        """Below a longer prefix, experts fused, beside a vision tower and what predicts further tokens."""
        raw, tensors = golden(name)
        prefix = "model." if name == "qwen3_next" else "model.language_model."
        others = {"mtp.layers.0.input_layernorm.weight", "mtp.fc.weight"}
        if name != "qwen3_next":
            others |= {"model.visual.patch_embed.proj.bias"}
        moved = {re.sub(r"^model\.", prefix, key): tensor for key, tensor in fused(tensors).items()}
        moved |= {key: np.ones(3, np.float32) for key in others}
        text = raw if name == "qwen3_next" else wrapped(raw)
        ours = load_target(write(tmp_path / "it", text, moved), dtype="float32")
        theirs = load_target(FOLDER / name, dtype="float32")
        assert ours.config == theirs.config
        for first, second in zip(*map(jax.tree.leaves, (ours.weights, theirs.weights)), strict=True):
            np.testing.assert_array_equal(first, second)
        unused = read_headers(tmp_path / "it").plan(ours.config).unused
        assert {name for names in unused.values() for name in names} == others


@pytest.fixture(scope="module")
def config():
    return parse_model_config(golden("qwen3_5")[0])


def held(weights):
    """The decay rates of the first layer, and the one type of all other parameters."""
    rates = weights["layers"][0]["linear_attn"]["A_log"]
    layers = [weights["layers"][i] for i in range(3)]
    kept = {id(layer["linear_attn"]["A_log"]) for layer in layers}
    (dtype,) = {leaf.dtype for leaf in jax.tree.leaves(weights) if id(leaf) not in kept}
    return np.asarray(rates), dtype


class TestDecayRates:
    """They stay float32, whatever type the weights are to have."""

    @pytest.mark.parametrize("name", NAMES)
    def test_of_a_new_model(self, name):
        config, bfloat16 = parse_model_config(golden(name)[0]), jnp.dtype(jnp.bfloat16)
        made = jax.eval_shape(lambda: weights_of(build(config, rngs=nnx.Rngs(0), dtype=bfloat16)))
        leaves = nnx.traversals.flatten_mapping(made)
        assert {path: leaf.dtype for path, leaf in leaves.items()} == {
            path: dtype_of(config, path, bfloat16) for path in leaves
        }
        kept = [path for path, leaf in leaves.items() if leaf.dtype == jnp.float32]
        assert {path[-1] for path in kept} == {"A_log"}
        assert len(kept) == sum(layer.recurrence is not None for layer in config.layers)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_read_and_written(self, tmp_path, config, dtype):
        raw, tensors = golden("qwen3_5")
        exact = tensors["model.layers.0.linear_attn.A_log"]
        assert exact.dtype == np.float32
        assert (exact != exact.astype(jnp.bfloat16).astype(np.float32)).any()
        weights = read_weights(FOLDER / "qwen3_5", config, jnp.dtype(dtype))
        rates, others = held(weights)
        assert others == dtype
        np.testing.assert_array_equal(rates, exact, strict=True)
        save_checkpoint(tmp_path / "ours", raw, weights, dtype="bfloat16")
        written = load_file(tmp_path / "ours" / "model.safetensors")
        np.testing.assert_array_equal(written["model.layers.0.linear_attn.A_log"], exact, strict=True)
        assert written["model.layers.0.linear_attn.dt_bias"].dtype == jnp.bfloat16

    def test_rounded_in_the_file(self, tmp_path, config):
        raw, tensors = golden("qwen3_5")
        rounded = {name: tensor.astype(jnp.bfloat16) for name, tensor in tensors.items()}
        folder = write(tmp_path / "it", raw, rounded)
        for dtype in (None, jnp.dtype(jnp.bfloat16)):
            rates, others = held(read_weights(folder, config, dtype))
            assert (rates.dtype, others) == (np.float32, jnp.bfloat16)

    def test_converted(self, tmp_path, config):
        pytest.importorskip("orbax.checkpoint")
        from convert.conversion import to_huggingface, to_orbax

        orbax, back = tmp_path / "orbax", tmp_path / "back"
        to_orbax(FOLDER / "qwen3_5", orbax, dtype="bfloat16")
        exact = golden("qwen3_5")[1]["model.layers.0.linear_attn.A_log"]
        rates, others = held(read_orbax_weights(orbax, config, jnp.dtype(jnp.float16)))
        assert others == jnp.float16
        np.testing.assert_array_equal(rates, exact, strict=True)
        to_huggingface(orbax, back, dtype="float16")
        written = load_file(back / "model.safetensors")
        np.testing.assert_array_equal(written["model.layers.0.linear_attn.A_log"], exact, strict=True)
        assert written["model.layers.0.linear_attn.norm.weight"].dtype == np.float16

    def test_bytes(self, config):
        count = num_parameters(config)
        assert weight_bytes(config, jnp.dtype(jnp.float32)) == 4 * count
        assert weight_bytes(config, jnp.dtype(jnp.bfloat16)) == 2 * count + 2 * 3 * 6
