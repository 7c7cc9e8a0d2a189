"""Draft heads as other engines write them: one meaning, and contradictions refused by key."""

import itertools
from dataclasses import replace

import pytest

from jetspec_jax.config import (
    SelectorConfig,
    causality_by_engine,
    check_head_fits,
    dialect_of,
    is_draft_head,
    parse_draft_head_config,
    parse_model_config,
)
from tests.loading.published import HEAD, V4, with_dflash, without

#: The same head in the format of the library speculators: tap layers count from 1.
SPECULATORS = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.9.0",
    "transformer_layer_config": without(
        HEAD, "dflash_config", "architectures", "block_size", "num_target_layers"
    ),
    "draft_vocab_size": 19,
    "block_size": 4,
    "max_anchors": 512,
    "target_hidden_size": None,
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 18,
    "sliding_window_non_causal": False,
    "sample_from_anchor": False,
    "projector_type": "dflash",
    "speculators_config": {
        "algorithm": "dflash",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "owner/target", "architectures": []},
    },
}


def with_decoder(**changes):
    return {**SPECULATORS, "transformer_layer_config": SPECULATORS["transformer_layer_config"] | changes}


class TestDflash:
    @pytest.mark.parametrize(
        "more",
        [
            {"is_causal": True},
            {"is_causal": True, "layer_types": ["full_attention"] * 2},
            {"mask_token_id": 18, "target_layer_ids": [0, 2]},
            {"eagle_aux_hidden_state_layer_ids": [1, 3]},
            {"draft_vocab_size": 19, "target_hidden_size": 12, "is_neox_style": True, "logit_scale": 1.0},
            {"sample_from_anchor": False},
        ],
    )
    def test_keys_at_the_top_mean_the_same(self, more):
        assert parse_draft_head_config(HEAD | more) == parse_draft_head_config(HEAD)

    def test_settings_that_sglang_keeps_inside(self):
        inside = {"block_size": 4, "num_target_layers": 3, "mask_token": "<|MASK|>"}
        raw = without(with_dflash(**inside), "block_size", "num_target_layers")
        assert parse_draft_head_config(raw) == parse_draft_head_config(HEAD)

    def test_settings_that_only_the_top_has(self):
        raw = with_dflash(causal_head=None, mask_token_id=None, target_layer_ids=None)
        raw |= {"is_causal": True, "mask_token_id": 18, "eagle_aux_hidden_state_layer_ids": [1, 3]}
        assert parse_draft_head_config(raw) == parse_draft_head_config(HEAD)

    @pytest.mark.parametrize("values", [*itertools.product([True, False, None], repeat=3)])
    def test_causality_is_what_all_keys_that_are_there_say(self, values):
        top, causal, causal_head = values
        raw = with_dflash(causal=causal, causal_head=causal_head) | {"is_causal": top}
        said = {value for value in values if value is not None}
        if len(said) == 2:
            with pytest.raises(ValueError, match="contradicts"):
                parse_draft_head_config(raw)
        else:
            assert parse_draft_head_config(raw).causal is (said == {True})

    @pytest.mark.parametrize(
        ("raw", "complaint"),
        [
            (
                HEAD | {"is_causal": False},
                "config.json: is_causal=False contradicts dflash_config.causal_head=True; each engine",
            ),
            (
                with_dflash(causal=False),
                "dflash_config.causal=False contradicts dflash_config.causal_head=True",
            ),
            (HEAD | {"mask_token_id": 3}, "dflash_config.mask_token_id=18 contradicts mask_token_id=3"),
            (
                HEAD | {"eagle_aux_hidden_state_layer_ids": [0, 2]},
                r"dflash_config.target_layer_ids=\[0, 2\] contradicts "
                r"eagle_aux_hidden_state_layer_ids=\[0, 2\]",
            ),
            (HEAD | {"sample_from_anchor": True}, "sample_from_anchor=True changes the model"),
            (
                with_dflash(selector_rank=-1, selector_top_k=20, selector_tail=1),
                "selector_rank must .*, not -1; selector_top_k must .* 1..19, not 20; selector_tail .* not 1",
            ),
            (HEAD | {"selector_rank": 8}, "selector_rank=8 changes .* read in dflash_config only"),
            (
                with_dflash(selector_rank=8, selector_top_k=5, conv_kernel_size=2),
                "conv_kernel_size=2 changes the model",
            ),
            *(
                (
                    with_dflash(draft_scales=scales),
                    "^config.json: dflash_config: draft_scales must be .* 3 numbers from 0.001 to 1000, or 3 "
                    "such lists, not ",
                )
                for scales in (
                    *([1.0, 1.0], [1.0, 0.0, 1.0], [1.0, 10**400, 1.0], [1.0, True, 1.0], 1.0),
                    *([[1.0] * 3] * 2, [[1.0] * 3, [1.0] * 3, [1.0, 0.0, 1.0]], [[1.0] * 3, 1.0, 1.0]),
                )
            ),
            (HEAD | {"draft_scales": [1.0] * 3}, "unknown .*draft_scales"),
        ],
    )
    def test_refused(self, raw, complaint):
        with pytest.raises(ValueError, match=complaint):
            parse_draft_head_config(raw)

    def test_scales_of_every_depth(self):
        assert parse_draft_head_config(HEAD).draft_scales is None
        found = parse_draft_head_config(with_dflash(draft_scales=[1, 0.5, 2.0]))
        assert found == replace(parse_draft_head_config(HEAD), draft_scales=(1.0, 0.5, 2.0))

    def test_scales_of_every_band(self):
        found = parse_draft_head_config(with_dflash(draft_scales=[[1, 0.5, 2.0]] * 2 + [[3, 2, 1]]))
        assert found.draft_scales == ((1.0, 0.5, 2.0), (1.0, 0.5, 2.0), (3.0, 2.0, 1.0))

    @pytest.mark.parametrize(
        ("keys", "expected"),
        [
            ({"selector_rank": 8, "selector_top_k": 5}, SelectorConfig(8, 5)),
            (
                {"selector_rank": 8, "selector_top_k": 5, "selector_tail": True},
                SelectorConfig(8, 5, tail=True),
            ),
            ({"selector_rank": 0, "selector_top_k": 0, "selector_tail": False}, None),
        ],
    )
    def test_a_selector(self, keys, expected):
        found = parse_draft_head_config(with_dflash(**keys))
        assert found == replace(parse_draft_head_config(HEAD), selector=expected)


class TestSpeculators:
    def test_it_is_the_same_head_but_for_the_target_s_depth(self):
        assert is_draft_head(SPECULATORS)
        found, native = parse_draft_head_config(SPECULATORS), parse_draft_head_config(HEAD)
        assert found.num_target_layers is None
        for name in ("layers", "block_size", "tap_layers", "mask_token_id", "causal"):
            assert getattr(found, name) == getattr(native, name)
        check_head_fits(found, parse_model_config(V4))
        with pytest.raises(ValueError, match=r"tap layers \[2\] lie outside the target's layers 0..1"):
            check_head_fits(found, parse_model_config(V4 | {"num_hidden_layers": 2}))

    def test_types_of_layers_at_the_top(self):
        raw = {**SPECULATORS, "layer_types": ["full_attention"] * 2, "sliding_window": 8}
        assert parse_draft_head_config(raw) == parse_draft_head_config(SPECULATORS)

    @pytest.mark.parametrize(("non_causal", "causal"), [(False, True), (True, False), (None, False)])
    def test_causality_is_vllm_s_reading(self, non_causal, causal):
        raw = {**SPECULATORS, "sliding_window_non_causal": non_causal}
        assert parse_draft_head_config(raw).causal is causal

    @pytest.mark.parametrize(
        ("raw", "complaint"),
        [
            (
                with_decoder(is_causal=False),
                "sliding_window_non_causal=False contradicts transformer_layer_config.is_causal=False",
            ),
            (SPECULATORS | {"speculators_model_type": "eagle3"}, "speculators_model_type must be 'dflash'"),
            (without(SPECULATORS, "transformer_layer_config"), "transformer_layer_config must be an object"),
            (SPECULATORS | {"block_size": 3}, "speculative_tokens=3, and block_size=3 leaves 1 to 2 slots"),
            (
                SPECULATORS | {"layer_types": ["sliding_attention"] * 2},
                r"layer_types=\['sliding_attention', 'sliding_attention'\] contradicts transformer_layer",
            ),
            (with_decoder(zoom=2), r"config.json: transformer_layer_config: unknown keys \['zoom'\]"),
        ],
    )
    def test_refused(self, raw, complaint):
        with pytest.raises(ValueError, match=complaint):
            parse_draft_head_config(raw)


@pytest.mark.parametrize(
    ("raw", "dialect", "causal"),
    [
        (HEAD, "dflash_config", {"jetspec": True, "sglang": False, "vllm": False}),
        (
            with_dflash(causal_head=None, causal=True),
            "dflash_config",
            {"jetspec": False, "sglang": False, "vllm": True},
        ),
        (HEAD | {"is_causal": True}, "dflash_config", {"jetspec": True, "sglang": False, "vllm": True}),
        (
            HEAD | {"is_causal": True, "layer_types": ["full_attention"] * 2},
            "dflash_config",
            {"jetspec": True, "sglang": True, "vllm": True},
        ),
        (
            with_dflash(causal_head=False),
            "dflash_config",
            {"jetspec": False, "sglang": False, "vllm": False},
        ),
        (SPECULATORS, "speculators_model_type", {"vllm": True}),
        (without(SPECULATORS, "sliding_window_non_causal"), "speculators_model_type", {"vllm": False}),
    ],
)
def test_what_each_engine_takes_it_for(raw, dialect, causal):
    parse_draft_head_config(raw)
    assert dialect_of(raw) == dialect
    assert causality_by_engine(raw) == causal
