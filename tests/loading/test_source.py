import dataclasses

import pytest

from jetspec_jax import load_draft_head, load_target
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.config import parse_draft_head_config, parse_model_config
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.inspect.describe import describe
from tests.loading.published import HEAD, V4, write


def test_nothing_is_looked_for_before_it_is_needed(tmp_path):
    source = Source(tmp_path / "nowhere", dtype="float8")
    with pytest.raises(FileNotFoundError, match="nowhere is neither a folder nor a hub id"):
        _ = source.config
    with pytest.raises(ValueError, match="dtype must be auto, float32, bfloat16 or float16, not 'float8'"):
        _ = source.weights_dtype


def test_either_kind(tmp_path):
    target, head = Source(write(tmp_path / "target", V4, {})), Source(write(tmp_path / "head", HEAD, {}))
    assert target.config == target.target_config == parse_model_config(V4)
    assert head.config == head.head_config == parse_draft_head_config(HEAD)


def test_ignored_keys_go_to_the_config(tmp_path):
    strict = Source(write(tmp_path / "target", {**V4, "zoom": 1}, {}))
    for name in ("config", "target_config"):
        with pytest.raises(ValueError, match=r"target/config\.json: unknown keys \['zoom'\]"):
            getattr(strict, name)
    assert dataclasses.replace(strict, ignore_config_keys=["zoom"]).config == parse_model_config(V4)


def test_the_config_is_read_once(tmp_path):
    source = Source(write(tmp_path / "target", V4, {}))
    config = source.target_config
    (tmp_path / "target" / "config.json").unlink()
    assert source.target_config is config
    assert source.raw_config == V4


def test_demo_is_the_embedded_pair(tmp_path, monkeypatch):
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder of this name is not meant
    target = load_target("demo", tokenizer="demo")
    assert target.config == Source(DEMO_TARGET).target_config == Source("demo").config
    assert target.tokenizer.encode("def f(x):")
    assert load_draft_head("demo", target=target).config == Source(DEMO_DRAFT_HEAD).head_config
    assert describe("demo") == describe(DEMO_TARGET)
