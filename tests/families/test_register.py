"""Families that a program adds by `register_family`."""

import json

import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams, load_target, logits, register_family
from jetspec_jax.config import parse_model_config, qwen3
from jetspec_jax.config.target import READERS
from jetspec_jax.models import FAMILIES
from jetspec_jax.models.qwen3 import Qwen3
from tests.decode.tiny import save_tiny_pair

IDS = [[3, 1, 4, 1, 5]]


@pytest.fixture(autouse=True)
def registry():
    known = [(table, dict(table)) for table in (FAMILIES, READERS)]
    yield
    for table, entries in known:
        table.clear()
        table.update(entries)


def register_scaled(factor):
    """Qwen3 with other logits, defined as by a cell of a notebook."""

    class Scaled(Qwen3):
        def logits(self, hidden, *, capped=True):
            return factor * super().logits(hidden, capped=capped)

    register_family("scaled", read=read_scaled, module=Scaled)


def read_scaled(fields):
    assert fields.optional("own_scale") == 2
    return qwen3.read(fields)


@pytest.fixture
def pair(tmp_path):
    """A checkpoint of the family, one of Qwen3 with the same weights, and a head for both."""
    target, head = save_tiny_pair(tmp_path)
    config = tmp_path / "target" / "config.json"
    raw = json.loads(config.read_text())
    plain = logits(load_target(target, dtype="float32"), IDS)
    config.write_text(json.dumps(raw | {"model_type": "scaled", "own_scale": 2.0}))
    return target, head, np.asarray(plain)


def test_a_checkpoint_decodes(pair):
    target, head, plain = pair
    with pytest.raises(ValueError, match=r"unknown model_type 'scaled'; supported: .*qwen3, .*gemma3, "):
        load_target(target)
    register_scaled(-1.0)
    np.testing.assert_allclose(logits(load_target(target, dtype="float32"), IDS), -plain, atol=1e-5)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(target, head, dtype="float32", budget=16) as trees, LLM(target, dtype="float32") as chain:
        found, expected = (llm.generate(IDS, params, use_tqdm=False)[0] for llm in (trees, chain))
    assert found.token_ids == expected.token_ids
    assert found.token_ids[0] == plain[0, -1].argmin()
    with pytest.raises(ValueError, match=r"unknown model_type 'other'; supported: .*scaled"):
        parse_model_config({"model_type": "other"})


def test_a_cell_that_runs_twice(pair):
    """A changed class gets programs of its own; a loaded target keeps the class it was loaded with."""
    target, _, plain = pair
    loaded = []
    for factor in (2.0, 3.0):
        register_scaled(factor)
        loaded.append((factor, load_target(target, dtype="float32")))
        for each, own in loaded:
            np.testing.assert_allclose(logits(own, IDS), each * plain, atol=1e-4)


def test_names_that_are_taken_and_wrong_types():
    register_scaled(1.0)

    class Other(Qwen3):
        pass

    for name in ("qwen3", "gemma3", "scaled"):
        with pytest.raises(ValueError, match=rf"model_type '{name}' is taken; .*qwen3.*gemma3"):
            register_family(name, read=qwen3.read, module=Other)
    with pytest.raises(ValueError, match="'qwen3' is taken"):
        register_family("qwen3", read=read_scaled, module=Qwen3)
    register_family("renamed", read=qwen3.read, module=Qwen3)
    register_family("renamed", read=qwen3.read, module=Qwen3)
    for wrong in ({"module": dict}, {"module": Qwen3.KEYS}, {"read": None}):
        with pytest.raises(TypeError, match=next(iter(wrong))):
            register_family("new", **{"read": qwen3.read, "module": Qwen3} | wrong)
    with pytest.raises(TypeError, match="model_type"):
        register_family(3, read=qwen3.read, module=Qwen3)
