"""Experts in MXFP4 that stay packed: what is kept, who decides, and what is refused."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from jetspec_jax import load_target
from jetspec_jax.checkpoint import packing
from jetspec_jax.checkpoint.packing import with_storage
from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_model_config
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.device.partition import check_partition
from jetspec_jax.models import kept_packed
from tests.loading.published import without, write
from tests.loading.test_gpt_oss import TINY, other_tensors, packed_experts
from tests.meshes import mesh_of

CONFIG = kept_packed(parse_model_config(TINY))
EXPERTS = "model.layers.1.mlp.experts."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write(tmp_path_factory.mktemp("packed") / "it", TINY, other_tensors() | packed_experts())


def test_memory_has_the_file_s_bytes_and_they_are_written_again(folder, tmp_path):
    weights, tensors = read_weights(folder, CONFIG), packed_experts()
    held = weights["layers"][1]["mlp"]["experts"]
    for name, part in (("values", "blocks"), ("scales", "scales")):
        gate_up = tensors[f"{EXPERTS}gate_up_proj_{part}"]  # gate and up in turns
        np.testing.assert_array_equal(
            held["gate_up_proj"][name], np.stack([gate_up[:, ::2], gate_up[:, 1::2]], 1)
        )
        np.testing.assert_array_equal(held["down_proj"][name], tensors[f"{EXPERTS}down_proj_{part}"])
    save_checkpoint(tmp_path / "ours", TINY, weights, dtype="float32")
    assert json.loads((tmp_path / "ours" / "config.json").read_text()) == TINY
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    theirs = load_file(folder / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)


@pytest.mark.parametrize(
    ("word", "faster", "room", "kept"),
    [
        ("auto", "widened", True, False),
        ("auto", "widened", False, True),
        ("auto", "packed", True, True),
        ("packed", "widened", True, True),
        ("widened", "packed", False, False),
    ],
)
def test_who_decides(folder, word, faster, room, kept, monkeypatch):
    asked = []

    def fits(needs, mesh):
        asked.append((sum(needs.values()), mesh))
        return room

    monkeypatch.setattr(packing, "fits", fits)
    monkeypatch.setattr(packing, "FASTER", {"cpu": faster, "gpu": faster})
    config = with_storage(Source(folder, mxfp4=word), None).target_config
    assert config == (CONFIG if kept else parse_model_config(TINY))
    # What is asked for leaves a fifth of the memory to the rest.
    wide = packing.weight_bytes(parse_model_config(TINY), np.dtype(np.float32))
    assert asked == ([(round(wide / 0.8), None)] if (word, faster) == ("auto", "widened") else [])


def test_blocks_that_a_mesh_would_cut_are_widened(folder, monkeypatch):
    monkeypatch.setattr(packing, "fits", lambda *_: True)
    monkeypatch.setattr(packing, "FASTER", {"cpu": "packed"})
    for cut, kept in (([], "packed"), (["experts"], "widened")):
        monkeypatch.setattr(packing, "cut_blocks", lambda *_, cut=cut: cut)
        monkeypatch.setattr(packing, "weight_bytes", lambda *_: 1)
        assert with_storage(Source(folder), object()).mxfp4 == kept


class TestRefused:
    @pytest.mark.parametrize(
        ("place", "settings", "message"),
        [
            (DEMO_TARGET, {"mxfp4": "packed"}, "mxfp4='packed': .* holds no experts in MXFP4"),
            (None, {"mxfp4": "packed", "dtype": "float16"}, "float16 does not hold all of its values"),
            (None, {"mxfp4": "int4"}, "mxfp4 must be auto, packed or widened, not 'int4'"),
        ],
    )
    def test_settings(self, folder, place, settings, message):
        with pytest.raises(ValueError, match=message):
            load_target(place or folder, **settings)

    def test_other_families_headers_are_not_asked_for(self, monkeypatch):
        monkeypatch.setattr(packing, "find_headers", lambda *_: pytest.fail("asked for"))
        assert with_storage(Source(DEMO_TARGET), None).mxfp4 == "widened"

    def test_float16_widens(self, folder):
        source = Source(folder, dtype="float16")
        assert with_storage(source, None).target_config == parse_model_config(TINY)

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            (
                "down_proj_scales",
                lambda own: np.full_like(own, 161),
                "down_proj_scales: a scale is the byte 161",
            ),
        ],
    )
    def test_tensors(self, tmp_path, name, change, message):
        tensors = other_tensors() | packed_experts()
        tensors[EXPERTS + name] = change(tensors[EXPERTS + name])
        with pytest.raises(ValueError, match=message):
            read_weights(write(tmp_path / "it", TINY, tensors), CONFIG)

    def test_a_file_that_is_not_packed(self, tmp_path):
        tensors = other_tensors()
        for layer in range(2):
            own = f"model.layers.{layer}.mlp.experts."
            tensors[f"{own}gate_up_proj"] = np.zeros((5, 64, 64), np.float32)
            tensors[f"{own}down_proj"] = np.zeros((5, 32, 64), np.float32)
        place = write(tmp_path / "it", without(TINY, "quantization_config"), tensors)
        assert with_storage(Source(place), None).mxfp4 == "widened"

    def test_a_mesh_that_cuts_blocks(self):
        message = (
            r"2 devices cannot split the model: mlp\.experts\.down_proj: parts of 16 values cut "
            r"MXFP4 blocks of 32 \(layers 0-1\)"
        )
        with pytest.raises(ValueError, match=message):
            check_partition(CONFIG, mesh_of(1, 2))
