"""Experts in MXFP4: they are widened by a conversion, and what it writes does not say otherwise."""

import contextlib
import json

import jax
import jax.numpy as jnp
import pytest

from convert.conversion import to_huggingface, to_orbax
from convert.folders import locate
from convert.verification import differing_files, verify
from jetspec_jax import load_target
from tests.convert.checkpoints import files_of
from tests.loading.published import without, write
from tests.loading.test_gpt_oss import TINY, other_tensors, packed_experts

WIDENED = without(TINY, "quantization_config")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The packed model, its Orbax folder, and what that became."""
    folder = tmp_path_factory.mktemp("packed")
    tensors = {name: tensor.astype(jnp.bfloat16) for name, tensor in other_tensors().items()}
    write(folder / "packed", TINY, tensors | packed_experts())
    to_orbax(folder / "packed", folder / "orbax")
    to_huggingface(folder / "orbax", folder / "back")
    return folder


def test_the_config_does_not_say_mxfp4(place):
    for name in ("orbax", "back"):
        assert json.loads((place / name / "config.json").read_text()) == WIDENED
    assert files_of(place / "orbax")["config.json"] == files_of(place / "back")["config.json"]


def test_the_result_loads(place):
    ours, packed = (load_target(place / name, dtype="float32") for name in ("back", "packed"))
    assert ours.config == packed.config
    assert jax.tree.all(jax.tree.map(jnp.array_equal, ours.weights, packed.weights))


@pytest.mark.wide
def test_the_comparison_allows_that(place):
    """All of what an expert layer computes is compiled for this, operation by operation."""
    assert verify(place / "packed", place / "orbax").ok


def test_and_no_more(place):
    assert differing_files(locate(place / "packed"), locate(place / "orbax")) == []
    assert differing_files(locate(place / "orbax"), locate(place / "back")) == []
    with config(place / "orbax", {**WIDENED, "attention_dropout": 0.5}):
        assert differing_files(locate(place / "packed"), locate(place / "orbax")) == ["config.json"]
    with config(place / "orbax", TINY):
        assert differing_files(locate(place / "packed"), locate(place / "orbax")) == ["config.json"]


def test_an_orbax_folder_whose_config_still_says_so(place, tmp_path):
    with config(place / "orbax", TINY):
        to_huggingface(place / "orbax", tmp_path / "back")
        assert differing_files(locate(place / "orbax"), locate(tmp_path / "back")) == []
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == WIDENED


@contextlib.contextmanager
def config(folder, raw):
    """Another config.json for a while, written as conversions write it."""
    path = folder / "config.json"
    before = path.read_text()
    path.write_text(json.dumps(raw, indent=2) + "\n")
    yield
    path.write_text(before)
