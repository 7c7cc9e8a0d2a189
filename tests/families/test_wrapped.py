"""Checkpoints of models of several modalities: their text model is that of a checkpoint of its own."""

import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jetspec_jax import load_target
from jetspec_jax.inspect.describe import describe
from tests.families.goldens import FOLDER, golden_target

# Of each family what its names begin with, as transformers saves it, and some tensors of the other parts.
WRAPPED = {
    "gemma3": ("language_model.model.", {"vision_tower.post_layernorm.bias", "multi_modal_projector.norm"}),
    "gemma4": ("model.language_model.", {"model.audio_tower.output_proj.bias", "model.embed_vision.weight"}),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("swapped", [False, True])
def test_text_model(tmp_path, name, swapped):
    prefix, others = WRAPPED[name]
    if swapped:  # as the other family has it
        prefix = {"language_model.model.": "model.language_model."}.get(prefix, "language_model.model.")
        others = {"model." + other.removeprefix("model.") for other in others}
    tensors = load_file(FOLDER / name / "model.safetensors")
    wrapped = {prefix + key.removeprefix("model."): tensor for key, tensor in tensors.items()}
    save_file(wrapped | {key: np.ones(3, np.float32) for key in others}, tmp_path / "model.safetensors")
    text = json.loads((FOLDER / name / "config.json").read_text())
    raw = {"model_type": name, "text_config": text, "vision_config": {"hidden_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(raw))

    ours, alone = load_target(tmp_path, dtype="float32"), golden_target(name)
    assert ours.config == alone.config
    assert ours.eos_token_ids == alone.eos_token_ids
    jax.tree.map(np.testing.assert_array_equal, ours.weights, alone.weights)
    about = describe(tmp_path)
    assert sum(about["unused_tensors"].values()) == 2
    assert (about["model_type"], about["text_model_type"]) == (name, f"{name}_text")


HEADS = ("lm_head.weight", "language_model.lm_head.weight")


def untied(folder, name, *heads):
    """A wrapped file with the embedding in reverse as each of these heads, which are not tied to it."""
    tensors = load_file(FOLDER / name / "model.safetensors")
    wrapped = {"language_model." + key: tensor for key, tensor in tensors.items()}
    head = tensors["model.embed_tokens.weight"][::-1]
    save_file(wrapped | {own: head.copy() for own in heads}, folder / "model.safetensors")
    text = json.loads((FOLDER / name / "config.json").read_text()) | {"tie_word_embeddings": False}
    raw = {"model_type": name, "text_config": text, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("head", HEADS)
def test_a_head_of_its_own(tmp_path, name, head):
    weights = load_target(untied(tmp_path, name, head), dtype="float32").weights
    np.testing.assert_array_equal(weights.pop("lm_head"), weights["embed_tokens"][::-1])
    jax.tree.map(np.testing.assert_array_equal, weights, golden_target(name).weights)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((), "missing: lm_head.weight"),
        (HEADS, "stored twice: lm_head, as lm_head.weight and as "),
    ],
)
def test_no_head_and_two(tmp_path, heads, message):
    with pytest.raises(ValueError, match=f"config:\n  {message}"):
        load_target(untied(tmp_path, "gemma3", *heads))


@pytest.mark.parametrize("stored", [True, False])
def test_flags_that_differ(tmp_path, stored):
    """The wrapper's decides: with a head of its own the text model's says tied, and without one untied."""
    untied(tmp_path, "gemma3", *HEADS[:stored])
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"]["tie_word_embeddings"] = stored
    raw["tie_word_embeddings"] = not stored
    (tmp_path / "config.json").write_text(json.dumps(raw))
    weights = load_target(tmp_path, dtype="float32").weights
    assert ("lm_head" in weights) is stored
    weights.pop("lm_head", None)
    jax.tree.map(np.testing.assert_array_equal, weights, golden_target("gemma3").weights)
