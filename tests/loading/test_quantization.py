"""What a quantization_config says, and what of it is refused by name."""

import dataclasses

import pytest

from jetspec_jax.config import parse_draft_head_config, parse_model_config
from jetspec_jax.config.quantization import Quantization
from jetspec_jax.models import quantized_blocks
from tests.loading.fp8 import blocks, channels
from tests.loading.published import HEAD, V4


def read(config, raw=V4):
    return parse_model_config({**raw, "quantization_config": config}).quantization


def test_both_dialects():
    assert read(blocks(128, 64)) == Quantization("fp8", 128, 64)
    left = blocks(128, 128, modules_to_not_convert=["lm_head", "model.layers.1"], activation_scheme="static")
    assert read(left) == Quantization("fp8", 128, 128, ("lm_head", "model.layers.1"), "static")
    ignored = ("lm_head", "re:.*mlp.gate$")
    assert read(channels()) == Quantization("compressed-tensors", 1, None, ignored)
    by_block = channels({"strategy": "block", "block_structure": [128, 128]}, ignore=["lm_head"])
    inputs = by_block["config_groups"]["group_0"]["input_activations"]
    inputs.update(strategy="group", group_size=128)
    assert read(by_block) == Quantization("compressed-tensors", 128, 128, ("lm_head",))
    others = [
        {"strategy": "token"},
        {"group_size": 64},
        {"num_bits": 4},
        {"type": "int"},
        {"dynamic": "local"},
    ]
    for other in others:
        changed = channels({"strategy": "block", "block_structure": [128, 128]})
        changed["config_groups"]["group_0"]["input_activations"] = {**inputs, **other}
        assert read(changed).activations not in ("dynamic", "static", "none")
    per_tensor = channels()
    per_tensor["config_groups"]["group_0"]["input_activations"]["strategy"] = "tensor"
    assert read(per_tensor).activations == "strategy 'tensor', float of 8 bits, groups of None"
    assert read(None) is None


def test_a_head_has_its_own():
    head = parse_draft_head_config({**HEAD, "quantization_config": blocks(128, 128)})
    assert head.layers.quantization == Quantization("fp8", 128, 128)
    assert quantized_blocks(head).keys() >= {("fc",), ("layers", 0, "mlp", "down_proj")}


@pytest.mark.parametrize(
    ("skipped", "module", "skips"),
    [
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.10.mlp.up_proj", False),
        ("mlp.gate", "model.layers.1.mlp.gate", True),
        ("mlp.gate", "model.layers.1.mlp.gate_proj", False),
        ("re:.*mlp.gate$", "model.layers.1.mlp.gate_proj", False),
        ("re:.*layers\\.1\\.", "model.layers.1.mlp.gate_proj", True),
        ("re:mlp", "model.layers.1.mlp.gate_proj", False),
    ],
)
def test_modules_that_are_left_out(skipped, module, skips):
    assert Quantization("fp8", 128, 128, (skipped,)).skips(module) == skips


def test_a_matrix_of_several_that_are_multiplied_at_once_is_not_left_out_alone():
    config = parse_model_config(
        {**V4, "quantization_config": blocks(128, 128, modules_to_not_convert=["layers.2.self_attn.v_proj"])}
    )
    wrong = "leaves out model.layers.2.self_attn.v_proj.weight and not model.layers.2.self_attn.q_proj.weight"
    with pytest.raises(ValueError, match=wrong):
        quantized_blocks(config)


def test_layers_of_a_head_are_quantised_together():
    for skipped in ("layers.0", "layers.1.self_attn"):
        config = blocks(128, 128, modules_to_not_convert=[skipped])
        head = parse_draft_head_config({**HEAD, "quantization_config": config})
        with pytest.raises(ValueError, match="leaves out queries, keys and values of 1 of the draft head's"):
            quantized_blocks(head)


def test_a_prefix_of_a_larger_model_is_known():
    config = parse_model_config({**V4, "quantization_config": blocks(128, 128)})
    named = dataclasses.replace(config.quantization, skipped=("model.layers.0",))
    assert ("layers", 0, "mlp", "down_proj") not in quantized_blocks(
        dataclasses.replace(config, quantization=named)
    )


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        *(
            (
                {"quant_method": method},
                f"quant_method '{method}' is not supported.*; supported: quant_method 'fp8'",
            )
            for method in ("awq", "gptq", "bitsandbytes", "modelopt", "mxfp4", "unheard-of")
        ),
        (blocks(128, 128, fmt="e4m3fnuz"), "fmt='e4m3fnuz' .* not supported"),
        (
            blocks(128, 128, activation_scheme="some"),
            "activation_scheme must be 'dynamic' or 'static', not 'some'",
        ),
        (
            blocks(128),
            r"weight_block_size must be a block's outputs and inputs, such as \[128, 128\], not \[128\]",
        ),
        (
            blocks(128, 128, weight_block_size=None),
            "no weight_block_size: scales of whole tensors are not supported",
        ),
        (blocks(128, 128, zoom=1), r": unknown keys \['zoom'\]"),
        (
            channels(kv_cache_scheme={"num_bits": 8}),
            "kv_cache_scheme: scales of a KV cache are not supported",
        ),
        (channels({"num_bits": 4}), "weights of type float of 4 bits are not supported"),
        (
            channels({"strategy": "tensor"}),
            "strategy 'tensor' is not supported; supported: 'channel' and 'block'",
        ),
        (channels(ignore=["re:(a*)*b"]), "ignore must be patterns of at most 3 repetitions"),
    ],
)
def test_refused_by_name(config, complaint):
    with pytest.raises(ValueError, match=f"(?s)^config.json: quantization_config.*{complaint}"):
        read(config)
