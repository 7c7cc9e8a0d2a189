import dataclasses
import logging
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jetspec_jax.checkpoint.reading import read_headers, read_weights
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_model_config
from jetspec_jax.inspect.describe import describe
from jetspec_jax.models import FAMILIES
from jetspec_jax.models.key_table import Skip
from tests.loading.families import EXPERTS, OneByOne, Packed, fused, in_turns, one_by_one, random_experts
from tests.loading.published import V4, write

RAW = {**V4, "num_hidden_layers": 2, "max_window_layers": 2}
CONFIG = parse_model_config(RAW)


@pytest.fixture
def experts():
    return random_experts(RAW)


@pytest.fixture(params=[OneByOne])
def family(request, monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen3", request.param)
    return request.param


def assert_are(weights, experts):
    gate, up, down, ends = experts
    np.testing.assert_array_equal(weights["lm_head"], ends["lm_head.weight"])
    np.testing.assert_array_equal(weights["embed_tokens"], ends["model.embed_tokens.weight"])
    for layer in range(len(gate)):
        held = weights["layers"][layer]["mlp"]["experts"]
        for expert in range(EXPERTS):
            np.testing.assert_array_equal(held["gate_up_proj"][expert, :, 0], gate[layer, expert].T)
            np.testing.assert_array_equal(held["gate_up_proj"][expert, :, 1], up[layer, expert].T)
            np.testing.assert_array_equal(held["down_proj"][expert], down[layer, expert].T)


def moved(tensors, prefix):
    return {re.sub(r"^model\.", prefix, name): tensor for name, tensor in tensors.items()}


def refused(folder, *tensors):
    with pytest.raises(ValueError, match="does not hold the tensors of its config") as info:
        read_weights(write(folder, RAW, *tensors), CONFIG)
    return str(info.value).splitlines()[1:]


class TestForms:
    @pytest.mark.parametrize(
        ("family", "published"),
        [(OneByOne, one_by_one), (OneByOne, fused), (Packed, in_turns)],
        indirect=["family"],
    )
    def test_all_are_read(self, tmp_path, family, experts, published):
        assert_are(read_weights(write(tmp_path / "it", RAW, published(*experts)), CONFIG), experts)

    @pytest.mark.parametrize(
        ("family", "first", "second"),
        [(OneByOne, one_by_one, fused), (Packed, in_turns, in_turns)],
        indirect=["family"],
    )
    def test_the_first_is_written(self, tmp_path, family, experts, first, second):
        weights = read_weights(write(tmp_path / "it", RAW, second(*experts)), CONFIG)
        save_checkpoint(tmp_path / "ours", RAW, weights, dtype=None)
        written, published = load_file(tmp_path / "ours" / "model.safetensors"), first(*experts)
        assert written.keys() == published.keys()
        for name, tensor in published.items():
            np.testing.assert_array_equal(written[name], tensor, strict=True)

    def test_each_parameter_has_its_own(self, tmp_path, family, experts):
        """One layer's matrices fused and another's apart: unusual, and not ambiguous."""
        apart, together = one_by_one(*experts), fused(*experts)
        mixed = {name: tensor for name, tensor in apart.items() if "layers.1" not in name}
        mixed |= {name: tensor for name, tensor in together.items() if "layers.1" in name}
        assert_are(read_weights(write(tmp_path / "it", RAW, mixed), CONFIG), experts)

    def test_two_at_once(self, tmp_path, family, experts):
        tensors = one_by_one(*experts)
        for name in ("model.layers.1.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
            tensors[name] = fused(*experts)[name]
        assert refused(tmp_path / "it", tensors) == [
            "  stored twice: layers.0.mlp.experts.down_proj, as "
            "model.layers.0.mlp.experts.0.down_proj.weight and as model.layers.0.mlp.experts.down_proj",
            "  stored twice: layers.1.mlp.experts.gate_up_proj, as "
            "model.layers.1.mlp.experts.0.gate_proj.weight and as model.layers.1.mlp.experts.gate_up_proj",
        ]

    def test_what_is_missing_of_the_one_that_is_there(self, tmp_path, family, experts):
        apart, together = one_by_one(*experts), fused(*experts)
        del apart["model.layers.1.mlp.experts.2.up_proj.weight"]
        del together["model.layers.1.mlp.experts.down_proj"]
        assert refused(tmp_path / "apart", apart) == [
            "  missing: model.layers.1.mlp.experts.2.up_proj.weight"
        ]
        # Nothing at all is there of that parameter, so it is the first form that is asked for.
        assert refused(tmp_path / "together", together) == [
            f"  missing: model.layers.1.mlp.experts.{i}.down_proj.weight" for i in range(EXPERTS)
        ]

    def test_many_alike_are_one_line(self, tmp_path, family, experts):
        raw = {**RAW, "num_hidden_layers": 4, "max_window_layers": 4}
        with pytest.raises(ValueError, match="does not hold the tensors") as info:
            read_weights(write(tmp_path / "it", raw, experts[3]), parse_model_config(raw))
        assert str(info.value).splitlines()[1:] == [
            f"  missing: model.layers.0.mlp.experts.0.{name}_proj.weight, and 11 more like it"
            for name in ("down", "gate", "up")
        ]

    def test_one_experts_type(self, tmp_path, family, experts):
        tensors = one_by_one(*experts)
        name = "model.layers.1.mlp.experts.2.down_proj.weight"
        tensors[name] = tensors[name].astype(np.float16)
        folder = write(tmp_path / "it", RAW, tensors)
        with pytest.raises(ValueError, match="different types") as info:
            read_weights(folder, CONFIG)
        assert "experts.1.down_proj.weight is F32, " + name + " is F16" in str(info.value)
        weights = read_weights(folder, CONFIG, np.dtype(ml_dtypes.bfloat16))
        expected = experts[2][1, 2].T.astype(np.float16).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(weights["layers"][1]["mlp"]["experts"]["down_proj"][2], expected)

    def test_one_experts_shape(self, tmp_path, family, experts):
        tensors = one_by_one(*experts)
        name = "model.layers.1.mlp.experts.2.down_proj.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)
        assert refused(tmp_path / "it", tensors) == [f"  misshapen: {name} is [20, 12], expected [12, 20]"]


class TestPrefixes:
    @pytest.mark.parametrize("prefix", OneByOne.PREFIXES)
    @pytest.mark.parametrize("published", [one_by_one, fused])
    def test_are_found(self, tmp_path, family, experts, prefix, published):
        folder = write(tmp_path / "it", RAW, moved(published(*experts), prefix))
        weights = read_weights(folder, CONFIG)
        assert_are(weights, experts)
        save_checkpoint(tmp_path / "ours", RAW, weights, dtype=None)
        assert load_file(tmp_path / "ours" / "model.safetensors").keys() == one_by_one(*experts).keys()

    def test_an_unknown_one(self, tmp_path, family, experts):
        lines = refused(tmp_path / "it", moved(fused(*experts), "transformer."))
        assert "  missing: model.embed_tokens.weight" in lines
        assert "  surplus: transformer.embed_tokens.weight" in lines

    def test_two_in_one_file(self, tmp_path, family, experts):
        tensors = moved(fused(*experts), "model.language_model.")
        tensors["model.embed_tokens.weight"] = tensors.pop("model.language_model.embed_tokens.weight")
        assert refused(tmp_path / "it", tensors) == [
            "  missing: model.language_model.embed_tokens.weight",
            "  surplus: model.embed_tokens.weight",
        ]


class TestUnused:
    EXTRA = (
        "model.visual.blocks.0.weight",
        "visual.blocks.1.weight",
        "model.layers.2.mlp.experts.0.down_proj.weight",
        "model.layers.3.anything",
    )
    FURTHER = dataclasses.replace(CONFIG, further_layers=2)

    def test_is_counted_and_said(self, tmp_path, family, experts, caplog):
        # A type that is not read and any shape: nobody looks.
        extra = {name: np.zeros(3, np.int8) for name in self.EXTRA}
        folder = write(tmp_path / "it", RAW, one_by_one(*experts) | extra)
        assert_are(read_weights(folder, self.FURTHER), experts)
        line = f"{folder}: tensors left unread: 2 (layers that predict further tokens), 2 (vision tower)"
        assert caplog.record_tuples == [("jetspec_jax", logging.WARNING, line)]
        assert read_headers(folder).plan(self.FURTHER).unused == {
            "layers that predict further tokens": sorted(self.EXTRA[2:]),
            "vision tower": list(self.EXTRA[:2]),
        }
        towers = write(tmp_path / "towers", RAW, one_by_one(*experts) | dict(list(extra.items())[:2]))
        assert describe(towers)["unused_tensors"] == {"vision tower": 2}

    def test_what_nobody_knows_is_an_error(self, tmp_path, family, experts):
        extra = ("model.layers.1.mlp.experts.3.up_proj.weight", "audio.weight", *self.EXTRA)
        tensors = one_by_one(*experts) | {name: np.zeros(3, np.float32) for name in extra}
        assert refused(tmp_path / "it", tensors) == [
            "  surplus: audio.weight",
            "  surplus: model.layers.1.mlp.experts.3.up_proj.weight",
            *(f"  surplus: {name}" for name in self.EXTRA[2:]),
        ]

    def test_a_needed_tensor_is_never_skipped(self, tmp_path, monkeypatch, experts):
        class Greedy(OneByOne):
            SKIPPED = (Skip(".*", "all of it"),)

        monkeypatch.setitem(FAMILIES, "qwen3", Greedy)
        folder = write(tmp_path / "it", RAW, one_by_one(*experts))
        assert_are(read_weights(folder, CONFIG), experts)
        assert read_headers(folder).plan(CONFIG).unused == {}
