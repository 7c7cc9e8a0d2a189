"""FP8 made of what is not quantised: the published layout, and how far it is off."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest

from convert.command import main
from convert.conversion import to_huggingface, to_orbax
from convert.folders import locate
from convert.quantizing import to_fp8
from jetspec_jax import CheckpointError, load_target
from jetspec_jax.config import parse_model_config
from tests.convert.checkpoints import random_values
from tests.loading.fp8 import FP8, blocks, channels, load, quantised, widened
from tests.loading.published import V4, target_shapes, write

# More than a block in either axis, and partial ones.
RAW = {**V4, "hidden_size": 136, "intermediate_size": 260, "num_hidden_layers": 1, "torch_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The source's tensors, the destination, and the reported error."""
    place = tmp_path_factory.mktemp("fp8")
    tensors = random_values(target_shapes(RAW), "bfloat16")
    write(place / "source", RAW, tensors)
    _, error = to_fp8(place / "source", place / "fp8")
    return tensors, place / "fp8", error


def test_it_is_what_numpy_makes_of_each_block(made):
    tensors, folder, _ = made
    wide = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    expected = quantised(wide, blocks(128, 128))
    found = load(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, own in found.items():
        if own.dtype == FP8 or name.endswith("_scale_inv"):
            np.testing.assert_array_equal(own.astype(np.float32), expected[name].astype(np.float32))
        else:
            assert own.tobytes() == tensors[name].tobytes()


def test_the_config_lists_what_stays(made):
    raw = json.loads((made[1] / "config.json").read_text())
    assert raw["quantization_config"] == blocks(128, 128, modules_to_not_convert=["lm_head"])
    assert load_target(made[1]).config == parse_model_config(raw)


def test_the_error_is_that_of_the_weights(made):
    tensors, folder, error = made
    wide = widened(load(folder / "model.safetensors"), blocks(128, 128))
    pairs = {
        name: (tensors[name].astype(np.float64), own.astype(np.float64))
        for name, own in wide.items()
        if "_proj" in name
    }
    off = {name: np.linalg.norm(ours - own) for name, (ours, own) in pairs.items()}
    sizes = {name: np.linalg.norm(ours) for name, (ours, _) in pairs.items()}
    total = np.linalg.norm(list(off.values())) / np.linalg.norm(list(sizes.values()))
    assert error.relative == pytest.approx(total, rel=1e-6)
    assert error.worst_relative == pytest.approx(max(off[name] / sizes[name] for name in off), rel=1e-6)
    # Three bits: half a step is at most 2^-4 of a value, and a third of that on average.
    assert 0.01 < error.relative < 2**-4


def test_the_command(made, tmp_path, capsys):
    source = made[1].parent / "source"
    assert main([str(source), str(tmp_path / "new"), "--quantize", "fp8"]) == 0
    said = capsys.readouterr().out
    assert "a Hugging Face folder of the target" in said
    assert f"the weights' error is {made[2].relative:.2%} (root mean square)" in said
    assert main([str(source), str(tmp_path / "x"), "--quantize", "fp8", "--verify"]) == 2
    assert "--quantize changes them" in capsys.readouterr().err


def test_what_is_quantised_already_is_refused(made, tmp_path):
    with pytest.raises(CheckpointError, match="is quantised already"):
        to_fp8(made[1], tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("config", [blocks(128, 128), channels()], ids=["blocks", "channels"])
def test_orbax_and_back_keep_every_bit(tmp_path, config):
    tensors = {name: own.astype(np.float32) for name, own in random_values(target_shapes(RAW)).items()}
    held = quantised(tensors, config, ml_dtypes.bfloat16)
    write(tmp_path / "fp8", {**RAW, "quantization_config": config}, held)
    to_orbax(tmp_path / "fp8", tmp_path / "orbax")
    to_huggingface(tmp_path / "orbax", tmp_path / "back")
    back = load(tmp_path / "back" / "model.safetensors")
    assert back.keys() == held.keys()
    for name, own in held.items():
        assert (back[name].dtype, back[name].tobytes()) == (own.dtype, own.tobytes()), name
    # And a folder of either kind is read alike.
    ours, theirs = (load_target(tmp_path / name, dtype="float32").weights for name in ("fp8", "orbax"))
    for mine, its in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(its))


def test_scales_that_are_not_positive_or_too_large(tmp_path):
    """They are not converted, and an Orbax folder that has them is refused by the parameter's name."""
    tensors = {name: own.astype(np.float32) for name, own in random_values(target_shapes(RAW)).items()}
    held = quantised(tensors, config := blocks(128, 128))
    scale = "model.layers.0.mlp.down_proj.weight_scale_inv"
    for name, value in (("zero", 0.0), ("large", 1e38)):
        held[scale][0, 0] = value
        source = write(tmp_path / name, {**RAW, "quantization_config": config}, held)
        with pytest.raises(CheckpointError, match=f"{scale}: a scale is {value:g}".replace("+", r"\+")):
            to_orbax(source, tmp_path / "refused")
        assert not (tmp_path / "refused").exists()
    to_orbax(locate(source, allow_nonfinite=True), tmp_path / "orbax")
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.mlp\.down_proj\.scales: a scale is .* in bfloat16$"
    ):
        load_target(tmp_path / "orbax", dtype="bfloat16")
    load_target(tmp_path / "orbax", dtype="bfloat16", allow_nonfinite=True)
