"""What the families' configs have in common: dialects, wrappers, and what is refused in each."""

import re

import pytest

from jetspec_jax.config import parse_model_config
from tests.loading import test_gemma3 as gemma3
from tests.loading import test_gemma4 as gemma4
from tests.loading import test_gpt_oss as gpt_oss
from tests.loading import test_qwen3_5 as qwen3_5
from tests.loading import test_qwen3_moe as moe
from tests.loading import test_step as step
from tests.loading.published import V4, V5, without

FP8, AWQ = {"quant_method": "fp8"}, {"quant_method": "awq"}
FULL, SLIDING = "full_attention", "sliding_attention"
#: Configs of several modalities, by the type of their text model.
WRAPPED = {
    "gemma3_text": gemma3.nested,
    "gemma4_text": gemma4.nested,
    "step3p5": step.wrapped,
    "qwen3_5_text": qwen3_5.wrapped,
    "qwen3_5_moe_text": qwen3_5.wrapped,
}


def forms(raw):
    """Where errors say that they are, and the config: alone, and below another model's if it has one."""
    found = [("config.json: ", raw)]
    if wrap := WRAPPED.get(raw["model_type"]):
        found.append(("config.json: text_config: ", wrap(raw)))
    return found


def both(newer, older, *keys):
    """Files of the newer dialect with keys of the older one: all of them, and each alone."""
    return [{**newer, **{key: older[key] for key in some}} for some in (keys, *([key] for key in keys))]


#: Configs, and how else the same models are described.
SAME = {
    "qwen3": (V4, [V5, {**V5, "rope_theta": 1000000}]),
    "qwen3_moe": (moe.OLDER, both(moe.NEWER, moe.OLDER, "num_experts", "rope_theta", "rope_scaling")),
    "gemma3": (
        gemma3.OLDER,
        [
            gemma3.NEWER,
            *both(gemma3.NEWER, gemma3.OLDER, "rope_theta", "rope_local_base_freq", "rope_scaling"),
            {**gemma3.NEWER, "rope_scaling": None},
            {**gemma3.OLDER, "rope_scaling": {**gemma3.OLDER["rope_scaling"], "rope_theta": 500000.0}},
        ],
    ),
    "gemma4": (
        gemma4.PUBLISHED,
        [
            gemma4.SAVED,
            *both(gemma4.SAVED, gemma4.PUBLISHED, "global_head_dim", "num_global_key_value_heads"),
            {**gemma4.PUBLISHED, "attn_logit_softcapping": None},
            # transformers pads the indices, so that they are sorted.
            {**gemma4.SAVED, "per_layer_config": {"01": gemma4.WIDE, "03": gemma4.WIDE}},
        ],
    ),
    "gpt_oss": (
        gpt_oss.GPT_OSS_20B,
        [
            gpt_oss.NEWER,
            *both(gpt_oss.NEWER, gpt_oss.GPT_OSS_20B, "rope_theta", "rope_scaling"),
            *(
                without(gpt_oss.GPT_OSS_20B, key)
                for key in (
                    *("layer_types", "swiglu_limit", "num_experts_per_tok", "attention_bias"),
                    *("rope_scaling", "rope_theta"),
                )
            ),
        ],
    ),
    "step": (
        step.HUB_TEXT,
        [
            step.NEWER_TEXT,
            *both(
                step.NEWER_TEXT,
                step.HUB_TEXT,
                *("moe_layers_enum", "rope_theta", "partial_rotary_factors", "rope_scaling"),
            ),
            {**step.HUB_TEXT, "moe_layers_enum": [*range(3, 45)]},
            {**without(step.NEWER_TEXT, "num_nextn_predict_layers"), "num_mtp_layers": 3},
        ],
    ),
    **qwen3_5.same_models(),
}

#: Settings that change the model, which nobody may ignore.
CHANGES = [
    *((V4, key, value) for key, value in (("mlp_bias", True), ("partial_rotary_factor", 0.5))),
    *(
        (raw, key, value)
        for raw in (V4, moe.OLDER, step.HUB_TEXT)
        for key, value in (("hidden_act", "gelu"), ("attention_bias", True))
    ),
    *(
        (raw, key, value)
        for raw in (gemma3.OLDER, gemma4.PUBLISHED)
        for key, value in (
            ("hidden_activation", "gelu"),
            ("attention_bias", True),
            ("use_bidirectional_attention", True if raw is gemma3.OLDER else "all"),
        )
    ),
    (gemma3.OLDER, "attn_logit_softcapping", 50.0),
    (gemma4.PUBLISHED, "hidden_size_per_layer_input", 256),
    (gemma4.PUBLISHED, "num_kv_shared_layers", 2),
    (gemma4.PUBLISHED, "use_double_wide_mlp", True),
    (gemma4.PUBLISHED, "use_bidirectional_attention", True),
    (gpt_oss.GPT_OSS_20B, "attention_bias", False),
    (gpt_oss.GPT_OSS_20B, "hidden_act", "gelu"),
    (gpt_oss.GPT_OSS_20B, "mlp_bias", True),
    (gpt_oss.GPT_OSS_20B, "partial_rotary_factor", 0.5),
    (step.HUB_TEXT, "sink", True),
    (step.HUB_TEXT, "zero_centered", False),
    (step.HUB_TEXT, "use_head_wise_attn_gate", False),
    (step.HUB_TEXT, "gating", "per-channel"),
    (step.HUB_TEXT, "use_bidirectional_attention", True),
    (step.HUB_TEXT, "att_impl_type", "MFA"),
    (step.HUB_TEXT, "use_rope_layers", [0, 1]),
    (step.HUB_TEXT, "yarn_only_types", [FULL, SLIDING]),
    (step.HUB_TEXT, "use_moe", False),
    (step.HUB_TEXT, "norm_expert_weight", False),
    (step.HUB_TEXT, "moe_router_activation", "softmax"),
    (step.HUB_TEXT, "use_moe_router_bias", False),
    (step.HUB_TEXT, "query_pre_attn_scalar", 64),
    *qwen3_5.CHANGES,
]


def each(raw, complaint, key, *values):
    return [(raw, {complaint: {key: value}}) for value in values]


def turning(share):
    """Gemma 4's rotary embedding, of which a share of a full layer's elements turns."""
    full = {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": share}
    return {"rope_parameters": {FULL: full, SLIDING: {"rope_theta": 1e4, "rope_type": "default"}}}


def sliding_share(share):
    """Step's rotary embeddings in the newer dialect, of which a share of a sliding layer's elements turns."""
    plain = {"rope_theta": 10000.0, "rope_type": "default", "partial_rotary_factor": share}
    return {"rope_parameters": {**step.NEWER_TEXT["rope_parameters"], SLIDING: plain}}


#: What is refused, by what of the message names it.
REFUSED = [
    (
        moe.OLDER,
        {
            "num_experts_per_tok 4 of 3 experts": {"num_experts_per_tok": 4},
            "num_experts and num_local_experts mean the same and differ": {"num_local_experts": 4},
            "unsupported rope type 'linear'": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
            "rope_theta is given twice and differs": {"rope_parameters": {"rope_theta": 1e6}},
            r"unknown keys \['shared_expert_intermediate_size'\]": {"shared_expert_intermediate_size": 5},
        },
    ),
    (
        gemma3.OLDER,
        {
            "sliding_window must be an integer": {"sliding_window": None},
            "final_logit_softcapping must be a positive number": {"final_logit_softcapping": 0},
            r"rope_scaling: rope_theta is given twice and differs: 1000000\.0, 5": {
                "rope_scaling": {**gemma3.OLDER["rope_scaling"], "rope_theta": 1e6}
            },
        },
    ),
    *(
        (gemma3.NEWER, {f"rope_parameters{complaint}": {"rope_parameters": rope}})
        for complaint, rope in (
            (" has no full_attention", {"rope_theta": 1e6, "rope_type": "default"}),
            (" has no sliding_attention", {FULL: {"rope_theta": 1e6}}),
            (r": unknown keys \['chunked'\]", {**gemma3.NEWER["rope_parameters"], "chunked": {}}),
        )
    ),
    (
        gemma4.PUBLISHED,
        {
            "layer_types must be a list": {"layer_types": None},
            "last of layer_types must be full": {"layer_types": [FULL] * 3 + [SLIDING]},
            "4 attention heads are no multiple of 3 KV heads": {"num_global_key_value_heads": 3},
            "rope_parameters has no sliding_attention": {"rope_parameters": None},
            **{
                f"full_attention: partial_rotary_factor={part} makes {size} of 16": turning(part)
                for part, size in ((1.5, 24), (0.1, 1), (0.01, 0))
            },
            r"unknown keys \['attn_logit_softcapping'\]": {"attn_logit_softcapping": 50.0},
            "per_layer_config and global_head_dim, num_global_key_value_heads mean the": {
                "per_layer_config": {}
            },
            "use_bidirectional_attention='all' .* 'vision', False, None$": {
                "use_bidirectional_attention": "all"
            },
        },
    ),
    *(
        (gemma4.SAVED, {complaint: {"per_layer_config": layers}})
        for complaint, layers in (
            ("layers of full_attention differ in per_layer_config", {"1": gemma4.WIDE}),
            ("per_layer_config: there is no layer '4'", {"1": gemma4.WIDE, "4": gemma4.WIDE}),
            ("per_layer_config: there is no layer 'last'", {"last": gemma4.WIDE}),
            (r"per_layer_config: 3: unknown keys \['skip'\]", {"3": {**gemma4.WIDE, "skip": ["mlp"]}}),
        )
    ),
    (
        gemma4.SAVED,
        {
            f"per_layer_config and {key} mean the same and differ": {key: value}
            for key, value in (("global_head_dim", 8), ("num_global_key_value_heads", 2))
        },
    ),
    (
        gpt_oss.GPT_OSS_20B,
        {
            "num_experts_per_tok and experts_per_token mean the same and differ": {"experts_per_token": 2},
            "sliding_window must be an integer of at least 1": {"sliding_window": None},
            "quant_method 'fp8' is not supported": {"quantization_config": FP8},
            r"quantization_config: unknown keys \['group_size'\]": {
                "quantization_config": {"quant_method": "mxfp4", "group_size": 16}
            },
            "rope_scaling: mscale and mscale_all_dim must be given together": {
                "rope_scaling": {**gpt_oss.GPT_OSS_20B["rope_scaling"], "mscale": 1.0}
            },
            r"unknown keys \['gating'\]": {"gating": True},
        },
    ),
    *each(
        gpt_oss.NEWER,
        "rope_parameters and rope_scaling mean the same and differ",
        *("rope_scaling", {"rope_type": "default"}, {**gpt_oss.GPT_OSS_20B["rope_scaling"], "factor": 4.0}),
    ),
    (
        step.HUB_TEXT,
        {
            r"unknown keys \['fp32_residual_connection'\]": {"fp32_residual_connection": True},
            "layer_types must be a list": {"layer_types": None},
            "1 swiglu_limits for 45 layers": {"swiglu_limits": [7.0]},
            "swiglu_limits_shared must be bounds that are not": {"swiglu_limits_shared": [0.0, False] * 24},
            r"moe_layers_enum has \[48\]": {"moe_layers_enum": "3,48"},
            "mlp_layer_types and moe_layers_enum mean the same and differ": {
                "mlp_layer_types": ["sparse"] * 45
            },
            "rope_theta must be a list of positive numbers": {"rope_theta": [5e6, None] * 24},
            "partial_rotary_factors must be a list of positive": {"partial_rotary_factors": [0.5, "1"] * 24},
            **{
                f"partial_rotary_factors={part} makes {size} of 128 .* 2, 4, 6, ... of them": {
                    "partial_rotary_factors": [part] * 48
                }
                for part, size in ((1.5, 192), (1.001, 128), (0.004, 0), (0.4, 51))
            },
            "unsupported rope type 'yarn' in rope_scaling": {"rope_scaling": {"rope_type": "yarn"}},
        },
    ),
    *(
        (step.HUB_TEXT, {complaint: {"attention_other_setting": {"num_attention_heads": 96, **other}}})
        for complaint, other in (
            ("attention_other_setting: num_attention_groups=4 changes", {"num_attention_groups": 4}),
            (r"attention_other_setting: unknown keys \['bias'\]", {"bias": True}),
        )
    ),
    *(
        (step.NEWER_TEXT, {complaint: {"per_layer_config": layers}})
        for complaint, layers in (
            ("layer 1 80 heads, and its type 96", {"01": {"num_attention_heads": 80}}),
            ("per_layer_config: layer 1 is there twice", {"1": {}, "01": {}}),
            ("gives layer 1 64 heads, and its type 96", {}),
            (
                r"per_layer_config: 1: unknown keys \['head_dim'\]",
                {"1": {"num_attention_heads": 96, "head_dim": 64}},
            ),
        )
    ),
    (
        step.NEWER_TEXT,
        {
            r"unsupported layer types \['linear'\] in mlp_layer_types": {"mlp_layer_types": ["linear"] * 45},
            **{
                f"sliding_attention: partial_rotary_factor={part} makes {size} of 128": sliding_share(part)
                for part, size in ((1.5, 192), (0.004, 0), (0.4, 51))
            },
            "rope_parameters has no sliding_attention": {"rope_parameters": {FULL: {"rope_theta": 1e4}}},
            "num_nextn_predict_layers and num_mtp_layers mean the same and differ": {"num_mtp_layers": 2},
            "rope_parameters and partial_rotary_factors mean the same and differ": {
                "partial_rotary_factors": [1.0] * 45
            },
            "rope_parameters and rope_scaling mean the same and differ": {
                "rope_scaling": {**step.HUB_TEXT["rope_scaling"], "factor": 4.0}
            },
            "rope_parameters and rope_theta mean the same and differ": {"rope_theta": [1e4] * 45},
        },
    ),
    *qwen3_5.REFUSED,
]


@pytest.mark.parametrize(("raw", "others"), SAME.values(), ids=SAME)
def test_the_same_model(raw, others):
    expected = parse_model_config(raw)
    for other in (raw, *others):
        for _, form in forms(other):
            assert parse_model_config(form) == expected


@pytest.mark.parametrize(("raw", "key", "value"), CHANGES)
def test_changed_maths(raw, key, value):
    said = re.escape(f"{key}={value!r}")
    for where, form in forms({**raw, key: value}):
        with pytest.raises(ValueError, match=f"^{where}{said} changes the model.* not supported") as error:
            parse_model_config(form)
        assert "ignore" not in str(error.value)
        with pytest.raises(ValueError, match=f"^{where}{said} changes .*; it cannot be ignored"):
            parse_model_config(form, ignore_config_keys=[key])


@pytest.mark.parametrize(
    ("raw", "changes", "complaint"),
    [(raw, changes, complaint) for raw, rows in REFUSED for complaint, changes in rows.items()],
)
def test_refused(raw, changes, complaint):
    for where, form in forms({**raw, **changes}):
        with pytest.raises(ValueError, match=f"^{where}.*{complaint}"):
            parse_model_config(form)


@pytest.mark.parametrize(
    "text",
    [gemma3.OLDER, gemma4.PUBLISHED, step.HUB_TEXT, qwen3_5.TEXT_27B, qwen3_5.TEXT_35B],
    ids=WRAPPED,
)
class TestWrapper:
    def test_the_type_may_be_left_out(self, text):
        raw = WRAPPED[text["model_type"]](text)
        untold = {**raw, "text_config": without(raw["text_config"], "model_type")}
        assert parse_model_config(untold) == parse_model_config(text)

    def test_refused(self, text):
        raw = WRAPPED[text["model_type"]](text)
        for changes, complaint in (
            ({"text_config": None}, "text_config must be an object, not None"),
            (
                {"text_config": {**text, "model_type": "qwen3"}},
                f"text_config: model_type must be '{text['model_type']}', not 'qwen3'",
            ),
            ({"quantization_config": AWQ}, "quantization_config: quant_method 'awq' is not supported"),
        ):
            with pytest.raises(ValueError, match=f"^config.json: {complaint}"):
                parse_model_config({**raw, **changes})

    def test_unknown_keys(self, text):
        raw = {**WRAPPED[text["model_type"]]({**text, "zoom": 2}), "hidden_size": 3}
        with pytest.raises(ValueError, match=r"config.json: text_config: unknown keys \['zoom'\]"):
            parse_model_config(raw)
        with pytest.raises(ValueError, match=r"^config.json: unknown keys \['hidden_size'\]"):
            parse_model_config(raw, ignore_config_keys=["zoom"])
        assert parse_model_config(raw, ignore_config_keys=["zoom", "hidden_size"]) == parse_model_config(text)

    def test_tied_and_not(self, text):
        """The wrapper's flag decides, as its class has the head; without one, the text model's."""
        for inner, outer, tied in (
            (False, True, True),
            (True, False, False),
            (True, None, True),
            (False, None, False),
            (None, True, True),
            (None, False, False),
        ):
            raw = WRAPPED[text["model_type"]]({**text, "tie_word_embeddings": inner})
            config = parse_model_config({**raw, "tie_word_embeddings": outer})
            assert config.tie_word_embeddings is tied
        with pytest.raises(ValueError, match=r"^config\.json: tie_word_embeddings must be true"):
            parse_model_config({**raw, "tie_word_embeddings": "no"})
