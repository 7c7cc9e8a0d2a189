import dataclasses
import math
import os
import re
import threading

import pytest

from jetspec_jax.config import (
    LayerConfig,
    ModelConfig,
    Rope,
    check_head_fits,
    default_tap_layers,
    parse_draft_head_config,
    parse_eos_token_ids,
    parse_model_config,
    read_json,
)
from jetspec_jax.config.target import READERS, RELATIVES, WRAPPERS
from jetspec_jax.models import FAMILIES
from tests.loading.published import HEAD, V4, V5, with_dflash, without

# What Qwen/Qwen3-8B publishes, and JetSpec's head for it.
QWEN3_8B = {
    **V4,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "vocab_size": 151936,
}
HEAD_8B = {
    **QWEN3_8B,
    "num_hidden_layers": 5,
    "block_size": 16,
    "num_target_layers": 36,
    "dflash_config": {"causal_head": True, "mask_token_id": 151669},
}


def test_every_model_type_has_a_family():
    assert set(READERS) == set(FAMILIES)
    assert {wrapper.text_type for wrapper in WRAPPERS.values()} <= set(READERS)


class TestTarget:
    def test_both_dialects(self):
        layer = LayerConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=Rope(1e6, 8), mlp_size=20)
        expected = ModelConfig(
            model_type="qwen3",
            vocab_size=19,
            hidden_size=12,
            rms_norm_eps=1e-6,
            max_position_embeddings=128,
            tie_word_embeddings=False,
            layers=(layer,) * 3,
        )
        assert parse_model_config(V4) == parse_model_config(V5) == expected
        assert expected.num_layers == 3

    def test_published(self):
        config = parse_model_config(QWEN3_8B)
        assert config.num_layers == 36
        assert config.layers[0].rope == Rope(1e6, 128)
        assert config.windows == (None,) * 36

    @pytest.mark.parametrize(("tied", "expected"), [(True, True), (False, False), (None, False)])
    def test_tied(self, tied, expected):
        raw = without(V5, "tie_word_embeddings") | ({} if tied is None else {"tie_word_embeddings": tied})
        assert parse_model_config(raw).tie_word_embeddings is expected

    @pytest.mark.parametrize("model_type", ["lama", "llama_text", None, 3])
    def test_unknown_model_type(self, model_type):
        with pytest.raises(
            ValueError, match=rf"unknown model_type {model_type!r}; supported: llama, mistral, qwen2"
        ):
            parse_model_config({**V4, "model_type": model_type})

    @pytest.mark.parametrize(
        ("model_type", "feature"),
        [
            ("qwen3_vl_moe", "positions on three axes"),
            ("gemma3n_text", "embeddings for each layer"),
            ("gemma2", "attention scores are capped"),
            ("qwen2_moe", "shared experts"),
        ],
    )
    def test_relatives(self, model_type, feature):
        complaint = f"config.json: model_type {model_type!r} is not supported: .*{re.escape(feature)}"
        with pytest.raises(ValueError, match=f"^{complaint}.*; supported: llama, "):
            parse_model_config({**V4, "model_type": model_type})

    def test_no_relative_is_supported(self):
        assert not {f"{name}{suffix}" for name in RELATIVES for suffix in ("", "_text")} & {
            *READERS,
            *WRAPPERS,
        }

    def test_unknown_keys_name_the_override(self):
        raw = {**V4, "zoom": 2, "attention_sink": 1}
        said = (
            r"unknown keys \['attention_sink', 'zoom'\].* ignore_config_keys=\['attention_sink', 'zoom'\], "
            "on the command line --ignore-config-key attention_sink --ignore-config-key zoom$"
        )
        with pytest.raises(ValueError, match=said):
            parse_model_config(raw)
        with pytest.raises(ValueError, match=r"unknown keys \['zoom'\]"):
            parse_model_config(raw, ignore_config_keys=["attention_sink"])
        assert parse_model_config(raw, ignore_config_keys=["attention_sink", "zoom"]) == parse_model_config(
            V4
        )

    def test_an_unknown_null_says_nothing(self):
        rope = {**V5["rope_parameters"], "zoom": None}
        for raw in ({**V4, "zoom": None}, {**V5, "rope_parameters": rope}):
            assert parse_model_config(raw) == parse_model_config(V4)
        assert parse_draft_head_config(with_dflash(zoom=None)) == parse_draft_head_config(HEAD)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("mlp_bias", False),
            ("quantization_config", None),
            ("auto_map", {"AutoModel": "dflash.DFlashDraftModel"}),
            ("partial_rotary_factor", 1.0),
        ],
    )
    def test_harmless_values(self, key, value):
        assert parse_model_config({**V4, key: value}) == parse_model_config(V4)

    @pytest.mark.parametrize(
        "key",
        [
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ],
    )
    @pytest.mark.parametrize("value", ["absent", 0, -8, True, 8.0, "8", None])
    def test_sizes(self, key, value):
        raw = without(V4, key) | ({} if value == "absent" else {key: value})
        with pytest.raises(ValueError, match=f"{key} must be an integer of at least 1"):
            parse_model_config(raw)

    @pytest.mark.parametrize("value", [None, 0, -1e-6, math.nan, math.inf, "1e-6"])
    def test_epsilon(self, value):
        with pytest.raises(ValueError, match="rms_norm_eps must be a positive number"):
            parse_model_config({**V4, "rms_norm_eps": value})

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3 KV heads"),
            ({"head_dim": 7}, "head_dim 7 is odd"),
            *(
                ({"rope_theta": theta}, "rope_theta must be a positive number")
                for theta in (0, -1e4, math.nan)
            ),
            ({"layer_types": ["full_attention"] * 2}, "2 layer_types for 3 layers"),
            ({"layer_types": ["linear_attention"] * 3}, r"unsupported layer types \['linear_attention'"),
            ({"layer_types": ["sliding_attention"] * 3, "sliding_window": 8}, "no sliding window is in use"),
            *(
                ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1, key: value}, key)
                for key in ("sliding_window", "max_window_layers")
                for value in (None, ...)  # null, and absent
            ),
        ],
    )
    def test_refused(self, changes, complaint):
        with pytest.raises(ValueError, match=f"^config.json: .*{complaint}"):
            parse_model_config({key: value for key, value in {**V4, **changes}.items() if value is not ...})

    def test_the_file_is_named(self):
        with pytest.raises(ValueError, match=r"^somewhere/config\.json: "):
            parse_model_config({**V4, "zoom": 2}, where="somewhere/config.json")


class TestRope:
    @pytest.mark.parametrize(
        "raw",
        [
            without(V4, "rope_theta"),
            without(V4, "rope_theta", "rope_scaling"),
            without(V5, "rope_parameters"),
            {**V5, "rope_parameters": {"rope_type": "default"}},
            {**V5, "rope_parameters": None},
        ],
    )
    def test_no_theta(self, raw):
        with pytest.raises(ValueError, match="neither rope_theta nor rope_parameters"):
            parse_model_config(raw)

    def test_two_thetas(self):
        both = {**V5, "rope_theta": 1000000}
        assert parse_model_config(both) == parse_model_config(V5)
        with pytest.raises(ValueError, match=r"given twice and differs: \[10000.0, 1000000.0\]"):
            parse_model_config({**V5, "rope_theta": 10000})

    @pytest.mark.parametrize("spelling", ["type", "rope_type"])
    @pytest.mark.parametrize("rope_type", ["dynamic", "linear", "llama3"])
    @pytest.mark.parametrize("where", ["rope_scaling", "rope_parameters"])
    def test_unknown_type(self, where, rope_type, spelling):
        base = V4 if where == "rope_scaling" else V5
        rope = {spelling: rope_type, "factor": 4.0, "rope_theta": 1e6}
        with pytest.raises(ValueError, match=f"unsupported rope type '{rope_type}' in {where}"):
            parse_model_config({**base, where: rope})

    @pytest.mark.parametrize("spelling", ["type", "rope_type"])
    def test_the_default_spelled_out(self, spelling):
        assert parse_model_config({**V4, "rope_scaling": {spelling: "default"}}) == parse_model_config(V4)

    @pytest.mark.parametrize("setting", [{"factor": 2.0}, {"partial_rotary_factor": 0.5}])
    def test_settings_that_change_the_angles(self, setting):
        rope = {"rope_type": "default", "rope_theta": 1e6, **setting}
        with pytest.raises(ValueError, match=r"unsupported settings .* in rope_parameters"):
            parse_model_config({**V5, "rope_parameters": rope})

    def test_two_types(self):
        both = {"rope_type": "default", "type": "yarn", "rope_theta": 1e6}
        with pytest.raises(ValueError, match="rope_parameters: rope_type and type mean the same and differ"):
            parse_model_config({**V5, "rope_parameters": both})


class TestWindows:
    def test_older_dialect(self):
        raw = {**V4, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        assert parse_model_config(raw).windows == (None, 8, 8)

    def test_newer_dialect(self):
        layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
        raw = {**V5, "use_sliding_window": True, "sliding_window": 8, "layer_types": layer_types}
        assert parse_model_config(raw).windows == (8, None, 8)

    @pytest.mark.parametrize("base", [V4, V5])
    def test_a_window_that_is_not_in_use(self, base):
        assert (
            parse_model_config({**base, "sliding_window": 8, "max_window_layers": 1}).windows == (None,) * 3
        )


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": [2, 0]}, None, (2, 0)),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, (0, 2)),
        ({"eos_token_id": 2}, {"eos_token_id": [5, 2, 7]}, (5, 2, 7)),
        ({"text_config": {"eos_token_id": 3}, "eos_token_id": [1, 6]}, {}, (1, 6, 3)),
        ({"text_config": {"eos_token_id": 3}}, {"eos_token_id": 5}, (5, 3)),
    ],
)
def test_eos(config, generation, expected):
    assert parse_eos_token_ids(config, generation) == expected


@pytest.mark.parametrize("eos", ["</s>", 1.5, [None], ["2"], True])
def test_eos_that_is_none(eos):
    said = rf"eos_token_id must be a token id or a list of them, not {re.escape(repr(eos))}"
    for raws, where in (
        (({"eos_token_id": eos}, None), "config.json"),
        (({"text_config": {"eos_token_id": eos}}, {}), "config.json: text_config"),
        (({"eos_token_id": 2}, {"eos_token_id": eos}), "generation_config.json"),
    ):
        with pytest.raises(ValueError, match=f"^somewhere/{where}: {said}"):
            parse_eos_token_ids(*raws, folder="somewhere")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_theta", "1e6"),
        ("rope_theta", math.inf),
        ("rope_scaling", "default"),
        ("layer_types", 3),
        ("sliding_window", "8"),
        ("max_window_layers", "1"),
        ("use_sliding_window", "false"),
        ("tie_word_embeddings", "false"),
    ],
)
def test_values_of_the_wrong_type(key, value):
    raw = {**V4, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    parse_model_config(raw)
    with pytest.raises(ValueError, match=f"config.json: .*{key}"):
        parse_model_config({**raw, key: value})


class TestIgnoredKeys:
    def test_what_is_understood_is_heeded(self):
        assert parse_model_config(V4, ignore_config_keys=list(V4)) == parse_model_config(V4)

    def test_a_name_that_is_understood_in_another_object(self):
        raw = {**HEAD, "causal_head": False}
        with pytest.raises(ValueError, match=r"config.json: unknown keys \['causal_head'\]"):
            parse_draft_head_config(raw)
        found = parse_draft_head_config(raw, ignore_config_keys=["causal_head"])
        assert found == parse_draft_head_config(HEAD)


BAD_DFLASH = (
    ("target_layer_ids", "a list of layer indices", ([], "02", 1, [0.5], [True], {"0": 1})),
    ("mask_token_id", "an integer of at least 0", (None, -1, True, "18")),
)


class TestDraftHead:
    def test_what_it_reads(self):
        config = parse_draft_head_config(HEAD)
        assert config.layers == parse_model_config({**V4, "num_hidden_layers": 2})
        assert (config.block_size, config.depth, config.num_target_layers) == (4, 3, 3)
        assert (config.tap_layers, config.mask_token_id, config.causal) == ((0, 2), 18, True)

    def test_published(self):
        config = parse_draft_head_config(HEAD_8B)
        assert config.tap_layers == (1, 9, 17, 25, 33)
        check_head_fits(config, parse_model_config(QWEN3_8B))

    @pytest.mark.parametrize(
        ("num_draft_layers", "num_target_layers", "taps"),
        [
            (1, 36, [18]),
            (1, 7, [3]),
            (2, 6, [1, 3]),
            (3, 6, [1, 2, 3]),
            (5, 36, [1, 9, 17, 25, 33]),
            (5, 48, [1, 12, 23, 34, 45]),
            (8, 40, [1, 6, 11, 16, 22, 27, 32, 37]),
        ],
    )
    def test_default_taps(self, num_draft_layers, num_target_layers, taps):
        assert default_tap_layers(num_draft_layers, num_target_layers) == taps
        raw = {
            **with_dflash(target_layer_ids=None),
            "num_hidden_layers": num_draft_layers,
            "num_target_layers": num_target_layers,
        }
        assert parse_draft_head_config(raw).tap_layers == tuple(taps)

    @pytest.mark.parametrize(
        ("raw", "complaint"),
        [
            *(
                (with_dflash(**{key: value}), f"{key} must be {what}")
                for key, what, values in BAD_DFLASH
                for value in values
            ),
            *(
                (without(HEAD, key) | own, f"{key} must be an integer of at least {least}")
                for key, least in (("block_size", 2), ("num_target_layers", 1))
                for own in ({}, {key: least - 1}, {key: 0}, {key: "4"})
            ),
            (with_dflash(causal_head="false"), "causal_head must be true or false"),
            ({**HEAD, "zoom": 2}, r"unknown keys \['zoom'\].*ignore_config_keys=\['zoom'\]"),
            (
                {**HEAD, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
                "sliding-window layers in a draft head",
            ),
        ],
    )
    def test_refused(self, raw, complaint):
        with pytest.raises(ValueError, match=complaint):
            parse_draft_head_config(raw)

    def test_target_hidden_size(self):
        assert parse_draft_head_config(with_dflash(target_hidden_size=12)) == parse_draft_head_config(HEAD)
        with pytest.raises(ValueError, match=r"target_hidden_size 16 differs .* hidden_size 12"):
            parse_draft_head_config(with_dflash(target_hidden_size=16))

    def test_draft_shift(self):
        assert parse_draft_head_config(with_dflash(draft_shift=False)) == parse_draft_head_config(HEAD)
        with pytest.raises(ValueError, match="draft_shift is not supported"):
            parse_draft_head_config(with_dflash(draft_shift=True))

    def test_unknown_dflash_key(self):
        raw = with_dflash(temper=2)
        with pytest.raises(ValueError, match=r"dflash_config: unknown keys \['temper'\].*ignore_config_keys"):
            parse_draft_head_config(raw)
        assert parse_draft_head_config(raw, ignore_config_keys=["temper"]) == parse_draft_head_config(HEAD)


class TestFit:
    @pytest.mark.parametrize(
        ("head", "complaint"),
        [
            (with_dflash(target_layer_ids=[0, 3]), r"tap layers \[3\] lie outside the target's layers 0..2"),
            (with_dflash(target_layer_ids=[-1, 0]), r"tap layers \[-1\] lie outside"),
            (
                with_dflash(capped_logits=True),
                r"needs the target's logit cap \(capped_logits\), and the target has none",
            ),
        ],
    )
    def test_one_misfit(self, head, complaint):
        target = parse_model_config(V4)
        check_head_fits(parse_draft_head_config(HEAD), target)
        with pytest.raises(ValueError, match=complaint) as info:
            check_head_fits(parse_draft_head_config(head), target)
        assert ";" not in str(info.value)

    def test_a_cap_of_the_target(self):
        capped = dataclasses.replace(parse_model_config(V4), logit_softcap=30.0)
        for flag in (True, False):
            check_head_fits(parse_draft_head_config(with_dflash(capped_logits=flag)), capped)

    def test_all_at_once(self):
        raw = with_dflash(mask_token_id=40, target_layer_ids=[0, 7])
        raw |= {"hidden_size": 16, "num_target_layers": 9, "vocab_size": 41}
        with pytest.raises(ValueError, match="does not fit the target") as info:
            check_head_fits(parse_draft_head_config(raw), parse_model_config(V4))
        for complaint in (
            "hidden_size is 16",
            "9 target layers",
            "[7]",
            "mask_token_id 40",
            "vocabulary of 41",
        ):
            assert complaint in str(info.value)


class TestReadJson:
    def test_a_pipe_is_read_once(self, tmp_path):
        """A shell's ``<(…)`` as a schema."""
        path = tmp_path / "pipe"
        os.mkfifo(path)
        writer = threading.Thread(target=path.write_text, args=('{"a": 1}',))
        writer.start()
        assert read_json(path) == {"a": 1}
        writer.join()
