"""The safetensors files, held against the library of that name."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_draft_head_config
from tests.convert.checkpoints import DRAFT, make, random_bits, read_raw, shapes_of


@pytest.fixture
def tensors():
    shapes = shapes_of(DRAFT)
    mixed = {name: shape for name, shape in shapes.items() if "norm" in name}
    return random_bits(shapes, "bfloat16") | random_bits(mixed, "float32")


@pytest.fixture
def weights(tmp_path, tensors):
    source = make(tmp_path / "source", DRAFT, tensors)
    return read_weights(source, parse_draft_head_config(DRAFT), allow_nonfinite=True)


def save(folder, weights, **settings):
    save_checkpoint(folder, DRAFT, weights, dtype=None, **settings)
    return folder


class TestOneFile:
    def test_is_what_the_library_writes(self, tmp_path, tensors, weights):
        ours = save(tmp_path / "ours", weights) / "model.safetensors"
        save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
        assert ours.read_bytes() == (tmp_path / "theirs").read_bytes()

    def test_a_type_that_is_not_stored(self, tmp_path, weights):
        weights["fc"] = np.ones(weights["fc"].shape, np.float64)
        with pytest.raises(ValueError, match="fc is float64"):
            save(tmp_path / "ours", weights)
        assert not (tmp_path / "ours").exists()


class TestShards:
    @pytest.mark.parametrize("limit", [1, 1000, 2500])
    def test_hold_all_tensors_once(self, tmp_path, tensors, weights, limit):
        folder = save(tmp_path / "ours", weights, max_shard_bytes=limit)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        assert index["weight_map"].keys() == tensors.keys()
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert files == [f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)]
        for file in files:
            inside = load_file(folder / file)
            assert {name for name, place in index["weight_map"].items() if place == file} == inside.keys()
            assert len(inside) == 1 or sum(tensor.nbytes for tensor in inside.values()) <= limit
        assert {name: content for name, (_, _, content) in read_raw(folder).items()} == {
            name: tensor.tobytes() for name, tensor in tensors.items()
        }

    def test_one_when_all_fits_exactly(self, tmp_path, tensors, weights):
        total = sum(tensor.nbytes for tensor in tensors.values())
        folder = save(tmp_path / "ours", weights, max_shard_bytes=total)
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        folder = save(tmp_path / "two", weights, max_shard_bytes=total - 1)
        assert len(list(folder.glob("*.safetensors"))) == 2
