"""A head that is stored beside the embedding that the config ties it to: Gemma 3, which ties by default."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jetspec_jax import load_target
from tests.families.goldens import FOLDER, golden_target


@pytest.fixture
def stored(tmp_path):
    """The folder, and what writes the head that it makes of the embedding into a file of its own."""
    folder = tmp_path / "gemma3"
    shutil.copytree(FOLDER / "gemma3", folder)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]

    def with_head(make):
        save_file({"lm_head.weight": make(embedding)}, folder / "more.safetensors")
        return folder

    return with_head


def test_equal(stored):
    folder = stored(lambda embedding: embedding)
    ours = load_target(folder, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, ours.weights, golden_target("gemma3").weights)


def test_different(stored):
    """Refused; with the word in the config it is used."""
    folder = stored(lambda embedding: embedding[::-1].copy())
    with pytest.raises(ValueError, match=r"lm_head.weight is not model.embed_tokens.weight"):
        load_target(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    ours = load_target(folder, dtype="float32").weights
    np.testing.assert_array_equal(ours["lm_head"], ours["embed_tokens"][::-1])


def test_another_shape(stored):
    folder = stored(lambda embedding: embedding[:-1].copy())
    with pytest.raises(ValueError, match=r"not tied: lm_head.weight is \[63, 32\] and .* is \[64, 32\]"):
        load_target(folder)
