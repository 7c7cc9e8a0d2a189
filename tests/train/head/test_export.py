"""Heads as they are written for each engine, judged by that engine's own rules and by draft logits."""

import dataclasses
import json

import numpy as np
import pytest

from jetspec_jax import Head, draft_logits, load_draft_head, load_target
from jetspec_jax.config import parse_draft_head_config
from jetspec_jax.inspect.describe import describe
from tests.decode.test_goldens import GOLDENS
from tests.loading.published import HEAD, with_dflash
from train.command import main
from train.head.config import with_selector
from train.head.engines import ENGINES, Verifier, engine_json

#: As many tokens as in `tests.decode.test_goldens`, whose compiled programs are used again.
IDS = [[5, 17, 3, 41, 9, 60, 22, 8, 30, 12]]


# How each engine reads a config.json, from its sources; `jetspec_jax.config` is not asked.


def jetspec_reads(raw):
    own = raw["dflash_config"]
    return own.get("causal_head", False), own["target_layer_ids"], own["mask_token_id"], raw["block_size"]


def vllm_reads(raw):
    if "speculators_model_type" in raw:
        assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == raw["block_size"] - 1
        assert "name_or_path" in raw["speculators_config"]["verifier"]
        own = {
            "causal": not raw.get("sliding_window_non_causal", True),
            "target_layer_ids": [layer - 1 for layer in raw["aux_hidden_state_layer_ids"]],
            "mask_token_id": raw["mask_token_id"],
        }
        kept = {key: raw[key] for key in ("block_size", "sample_from_anchor")}
        raw = {**raw["transformer_layer_config"], **kept, "dflash_config": own}
    own = raw["dflash_config"]
    assert not raw.get("sample_from_anchor")
    causal = raw.get("is_causal")
    causal = own.get("causal", False) if causal is None else causal
    return causal, own["target_layer_ids"], own["mask_token_id"], raw["block_size"]


def sglang_reads(raw):
    own = raw["dflash_config"]
    assert all(0 <= layer < raw["num_target_layers"] for layer in own["target_layer_ids"])
    causal = bool(raw.get("is_causal")) if raw.get("layer_types") else False
    return causal, own["target_layer_ids"], own["mask_token_id"], raw["block_size"]


READERS = {
    "jetspec": [jetspec_reads, vllm_reads, sglang_reads],
    "vllm": [vllm_reads],
    "sglang": [sglang_reads],
    "speculators": [vllm_reads],
}


def as_read(head, reading):
    """The head with the settings that an engine has read."""
    causal, taps, mask, block = reading
    config = dataclasses.replace(
        head.config, causal=causal, tap_layers=tuple(taps), mask_token_id=mask, block_size=block
    )
    return Head(config, head.weights)


@pytest.fixture(scope="module")
def target():
    return load_target(GOLDENS / "target", dtype="float32")


@pytest.fixture(scope="module", params=["causal", "bidirectional"])
def folder(request):
    return GOLDENS / f"draft_head_{request.param}"


@pytest.fixture(scope="module")
def expected(target, folder):
    return draft_logits(target, load_draft_head(folder, dtype="float32"), IDS)


NAMED = Verifier("owner/target", ("Qwen3ForCausalLM",))


@pytest.mark.parametrize("engine", ENGINES)
def test_each_engine_drafts_what_the_head_drafts(engine, target, folder, expected, tmp_path, capsys):
    out = tmp_path / engine
    command = ["export", "--from", str(folder), "--out", str(out), "--for", engine]
    assert main([*command, "--model", str(GOLDENS / "target")]) == 0
    assert capsys.readouterr().out == f"the head is in {out}, for {engine}\n"
    # By our reader, then by the engine's rules over the tensors that were written.
    head = load_draft_head(out, dtype="float32", target=target)
    assert head.config.num_target_layers in (target.config.num_layers, None)
    depth = target.config.num_layers
    head = Head(dataclasses.replace(head.config, num_target_layers=depth), head.weights)
    np.testing.assert_array_equal(draft_logits(target, head, IDS), expected)
    raw = json.loads((out / "config.json").read_text())
    for read in READERS[engine]:
        np.testing.assert_array_equal(draft_logits(target, as_read(head, read(raw)), IDS), expected)
    about = describe(out, GOLDENS / "target")
    dialect = "speculators_model_type" if engine == "speculators" else "dflash_config"
    assert (about["dialect"], about["fits"]) == (dialect, True)
    right = ["vllm"] if engine == "speculators" else ["jetspec", "sglang", "vllm"]
    assert about["causality_read_by"] == right


def test_without_its_keys_sglang_drafts_something_else(target):
    """The test above can fail: the published config alone is read as bidirectional."""
    folder = GOLDENS / "draft_head_causal"
    head = load_draft_head(folder, dtype="float32")
    reading = sglang_reads(json.loads((folder / "config.json").read_text()))
    difference = draft_logits(target, as_read(head, reading), IDS) - draft_logits(target, head, IDS)
    assert np.abs(difference).max() > 0.01
    assert describe(folder)["causality_read_by"] == ["jetspec"]


@pytest.mark.parametrize("dialect", ENGINES)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_dialect_becomes_every_other(dialect, engine):
    config = parse_draft_head_config(HEAD)
    first = engine_json(dialect, HEAD, config, NAMED)
    again = engine_json(engine, first, config, NAMED)
    found = parse_draft_head_config(again)
    assert dataclasses.replace(found, num_target_layers=3) == config
    if engine != "speculators" and dialect != "speculators":
        assert again == first


def test_scales_are_read_back():
    raw = with_dflash(draft_scales=[1.0, 0.5, 2.0], selector_rank=2, selector_top_k=5)
    config = parse_draft_head_config(raw)
    assert config.draft_scales == (1.0, 0.5, 2.0)
    assert parse_draft_head_config(engine_json("jetspec", raw, config)) == config
    # They were fitted with the selector.
    without = parse_draft_head_config(with_selector(raw, None))
    assert (without.selector, without.draft_scales) == (None, None)


def test_what_is_written_of_the_target():
    config = parse_draft_head_config(HEAD)
    raw = engine_json("speculators", HEAD, config, NAMED)
    assert raw["speculators_config"]["verifier"] == {
        "name_or_path": "owner/target",
        "architectures": ["Qwen3ForCausalLM"],
    }
    assert engine_json("speculators", raw, config) == raw
    with pytest.raises(ValueError, match="a head for speculators names its target; name it with --model"):
        engine_json("speculators", HEAD, config)


@pytest.mark.parametrize("engine", [name for name in ENGINES if name != "jetspec"])
def test_an_engine_that_cannot_express_a_head_is_named(engine):
    selector = {"selector_rank": 2, "selector_top_k": 5}
    raw = with_dflash(scaled_embeddings=False, capped_logits=True, **selector)
    config = parse_draft_head_config(raw)
    reasons = (
        "cannot express this head: .*scaled_.* and .*capped_.* and .*selector_rank=2; --without-selector"
    )
    with pytest.raises(ValueError, match=f"^{engine} {reasons}"):
        engine_json(engine, raw, config)
    again = engine_json("jetspec", raw, config)
    assert parse_draft_head_config(again) == config


def test_a_target_s_depth_that_nobody_says():
    raw = engine_json("speculators", HEAD, parse_draft_head_config(HEAD), NAMED)
    config = parse_draft_head_config(raw)
    with pytest.raises(ValueError, match=r"a head for sglang holds the target's number of layers.*--model"):
        engine_json("sglang", raw, config)


def test_bad_input_is_named_and_writes_nothing(tmp_path, capsys):
    out = ["--out", str(tmp_path / "out")]
    for arguments, complaint in (
        (["--from", str(GOLDENS / "target")], "is a target, not a draft head"),
        (["--from", "demo", "--model", str(GOLDENS / "target")], "the draft head does not fit the target"),
        (["--from", str(tmp_path / "nothing")], "nothing"),
    ):
        assert main(["export", *arguments, *out]) == 2
        assert complaint in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    assert main(["export", "--from", "demo", *out]) == 2
    assert "out" in capsys.readouterr().err
