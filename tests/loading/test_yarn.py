"""YaRN in the configs of the Qwen3 families."""

import math

import pytest

from jetspec_jax.config import Rope, parse_draft_head_config, parse_model_config
from jetspec_jax.config.geometry import Yarn
from tests.loading.published import without
from tests.loading.test_config import HEAD_8B, QWEN3_8B

# What the publisher of Qwen3-8B tells people to add; max_position_embeddings stays.
SCALING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
MOE = {
    **without(QWEN3_8B, "max_window_layers"),
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}


def parse(**said):
    return parse_model_config({**QWEN3_8B, "rope_scaling": {**SCALING, **said}})


@pytest.mark.parametrize(
    "said",
    [
        {"rope_scaling": SCALING},
        {"rope_scaling": {**without(SCALING, "rope_type"), "type": "yarn"}},
        {"rope_scaling": {**SCALING, "rope_theta": 1e6, "beta_fast": 32, "beta_slow": 1, "truncate": True}},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {**SCALING, "rope_theta": 1e6}},
        {"rope_parameters": SCALING, "rope_scaling": SCALING},
    ],
)
@pytest.mark.parametrize("raw", [QWEN3_8B, MOE], ids=["qwen3", "qwen3_moe"])
def test_every_spelling(raw, said):
    config = parse_model_config({**raw, **said})
    scaling = Yarn(4.0, 32.0, 1.0, 32768, True, 0.1 * math.log(4) + 1)
    assert {layer.rope for layer in config.layers} == {Rope(1e6, 128, scaling=scaling)}
    assert config.max_position_embeddings == 131072


def test_a_draft_head():
    head = parse_draft_head_config({**HEAD_8B, "rope_scaling": SCALING})
    assert head.layers.layers[0].rope == parse().layers[0].rope


def test_a_context_that_is_said_to_be_longer():
    raw = {**QWEN3_8B, "max_position_embeddings": 200_000, "rope_scaling": SCALING}
    assert parse_model_config(raw).max_position_embeddings == 200_000


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"attention_factor": 1.5}, 1.5),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, 1.1386294361 / 1.0693147181),
        ({"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.0}, 1.0),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_attention_factor(said, expected):
    assert parse(**said).layers[0].rope.scaling.attention_factor == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"factor": 0.5}, r"rope_scaling: factor must be at least 1 for rope type 'yarn', not 0\.5"),
        ({"original_max_position_embeddings": None}, "embeddings must be an integer of at least 1, not None"),
        (
            {"original_max_position_embeddings": 40961},
            "original_max_position_embeddings 40961 is beyond max_position_embeddings 40960",
        ),
        ({"beta_fast": 2, "beta_slow": 3}, r"beta_fast must be at least beta_slow, which is 3\.0, not 2\.0"),
        (
            {"mscale": 1.0, "mscale_all_dim": 1.0, "attention_factor": 1.1},
            r"attention_factor is 1\.1, and mscale 1\.0 and mscale_all_dim 1\.0 make it 1$",
        ),
        ({"type": "default"}, "rope_type and type mean the same and differ"),
        ({"short_factor": [1.0]}, r"unsupported settings \['short_factor'\] of rope type 'yarn'"),
    ],
)
def test_refused(said, complaint):
    with pytest.raises(ValueError, match=f"^config.json: .*{complaint}"):
        parse(**said)


def test_a_base_that_makes_no_frequencies():
    raw = {**QWEN3_8B, "rope_theta": 1.0, "rope_scaling": SCALING}
    with pytest.raises(ValueError, match=r"rope_theta must be above 1 for rope type 'yarn', not 1\.0"):
        parse_model_config(raw)
