import dataclasses
import re

import numpy as np
import pytest

from jetspec_jax.config import parse_model_config
from jetspec_jax.models.key_table import LAYER_KEYS, Key, Skip
from jetspec_jax.models.layout import parse_layout
from tests.loading.published import V4

CONFIG = parse_model_config(V4)  # of three layers


def numbered(*shape):
    return np.arange(np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


class TestLayout:
    @pytest.mark.parametrize(
        ("layout", "shape", "stored"),
        [
            ("m g r e -> (g r e) m", (3, 2, 4, 5), (40, 3)),
            ("e m two i -> e (two i) m", (2, 3, 2, 5), (2, 10, 3)),
            ("e m two i -> e m (i two)", (2, 3, 2, 5), (2, 3, 10)),
            ("c k -> c () k", (3, 4), (3, 1, 4)),
            ("-> ()", (), (1,)),
            ("m g e -> (g e) m", (70, 2, 33), (66, 70)),
            ("m i -> i m", (40, 100), (100, 40)),
            ("h e m -> m (h e)", (3, 7, 65), (65, 21)),
            ("e m two i -> e (two i) m", (2, 3, 2, 90), (2, 180, 3)),
            ("e m i -> e m i", (70, 2, 3), (70, 2, 3)),
        ],
    )
    def test_there_and_back(self, layout, shape, stored):
        key, parameter = Key("stored", "held", layout), numbered(*shape)
        [shape_in_file] = key.file_shapes(shape)
        tensor = key.to_file(parameter)
        assert tensor.shape == shape_in_file == stored
        assert tensor.flags.c_contiguous
        again = np.full(shape, np.nan, np.float32)
        key.from_file(again, tensor)
        np.testing.assert_array_equal(again, parameter)

    def test_heads_of_a_linear(self):
        """Output (g r e) of the file is the dot product with the parameter's column (g, r, e)."""
        parameter = numbered(3, 2, 4, 5)
        tensor = Key("stored", "held", "m g r e -> (g r e) m").to_file(parameter)
        for g, r, e in np.ndindex(2, 4, 5):
            np.testing.assert_array_equal(tensor[(g * 4 + r) * 5 + e], parameter[:, g, r, e])

    def test_in_turns_and_in_halves(self):
        parameter = numbered(2, 3, 2, 5)
        turns = Key("stored", "held", "e m two i -> e m (i two)").to_file(parameter)
        halves = Key("stored", "held", "e m two i -> e (two i) m").to_file(parameter)
        for i in range(5):
            np.testing.assert_array_equal(turns[:, :, 2 * i], parameter[:, :, 0, i])
            np.testing.assert_array_equal(turns[:, :, 2 * i + 1], parameter[:, :, 1, i])
            np.testing.assert_array_equal(halves[:, 5 + i], parameter[:, :, 1, i])

    @pytest.mark.parametrize(
        "text", ["m", "m h", "m -> (h", "m h -> (m (h))", "m, h -> h m", "m h -> h -> m"]
    )
    def test_no_layout(self, text):
        with pytest.raises(ValueError, match=f"layout {re.escape(repr(text))} is not of the form"):
            parse_layout(text)

    @pytest.mark.parametrize("text", ["m h -> m", "m -> m h", "m m -> m m", "m h -> m (h m)", "m -> ()"])
    def test_axes_that_do_not_match(self, text):
        with pytest.raises(ValueError, match="does not name each axis once"):
            Key("stored", "held", text)


class TestKey:
    def test_parts_of_a_parameter(self):
        parameter = numbered(3, 2, 4, 5)
        keys = [key for key in LAYER_KEYS if key.path.endswith("qkv_proj")]
        assert [key.file_shapes(parameter.shape) for key in keys] == [((20, 3),), ((10, 3),), ((10, 3),)]
        again = np.full(parameter.shape, np.nan, np.float32)
        for key in keys:
            key.from_file(again, key.to_file(parameter))
        np.testing.assert_array_equal(again, parameter)

    def test_an_entry_of_a_layer(self):
        key = Key("model.layers.{}.norm.weight", "layers.{}.norm.weight")
        assert key.of([7], (3,)) == [Key("model.layers.7.norm.weight", "layers.7.norm.weight")]

    @pytest.mark.parametrize("part", [..., 1, np.s_[:, 1], np.s_[1:, :1]], ids=str)
    def test_experts_one_by_one(self, part):
        """What the index picks of the first axis is what layout and part are about."""
        parameter = numbered(3, 4, 2)
        layout = {0: "", 1: "a -> a ()", 2: "a b -> b a"}[parameter[0][part].ndim]
        keys = Key("layers.{}.{}.up", "layers.{}.up", layout, part, expert=True).of([5], parameter.shape)
        assert [key.names for key in keys] == [("layers.5.0.up",), ("layers.5.1.up",), ("layers.5.2.up",)]
        again = np.zeros_like(parameter)
        for i, key in enumerate(keys):
            assert key.path == "layers.5.up"
            tensor = key.to_file(parameter)
            np.testing.assert_array_equal(tensor, Key("stored", "held", layout, part).to_file(parameter[i]))
            assert key.file_shapes(parameter.shape) == (tensor.shape,)
            key.from_file(again, tensor)
        filled = np.zeros_like(parameter)
        filled[(slice(None), *(part if isinstance(part, tuple) else (part,)))] = 1
        np.testing.assert_array_equal(again, parameter * filled)

    def test_another_prefix(self):
        key = Key("model.a.{}", "a.{}", form="mxfp4", scales="model.b.{}", layout="e i j -> e j i")
        moved = key.under("language_model.model.", instead_of="model.")
        assert moved.names == ("language_model.model.a.{}", "language_model.model.b.{}")
        assert dataclasses.replace(moved, name=key.name, scales=key.scales) == key
        lm_head = Key("lm_head.weight", "lm_head")
        assert lm_head.under("language_model.model.", instead_of="model.") == lm_head
        assert lm_head.under("model.").name == "model.lm_head.weight"

    @pytest.mark.parametrize(
        ("key", "complaint"),
        [
            (("layers.{}.a", "layers.{}.b", "", ..., True), "1 indices, and layers.{}.b needs 2"),
            (("layers.{}.{}.a", "layers.{}.b"), "2 indices, and layers.{}.b needs 1"),
            (("a", "b", "e i j -> e (i j)", ..., False, "", "c"), "with the last one of the file unmerged"),
            (("a", "b", "i j -> j i", ..., False, "", "c"), "need a layout of three axes"),
            (("a.{}", "b.{}", "e i j -> e i j", ..., False, "", "c"), "c has 0 indices, and b.{} needs 1"),
        ],
    )
    def test_what_could_never_fit(self, key, complaint):
        with pytest.raises(ValueError, match=re.escape(complaint)):
            Key(*key)

    def test_a_layout_of_other_axes(self):
        with pytest.raises(ValueError, match=r"has 2 axes, and its part of b \[2, 3, 4\] has 3"):
            Key("a", "b", "i j -> j i").file_shapes((2, 3, 4))


class TestSkip:
    def test_names(self):
        skip = Skip(r"model\.visual\..*", "vision tower")
        assert skip.matches("model.visual.blocks.0.weight", CONFIG)
        assert not skip.matches("model.visuals.weight", CONFIG)
        assert not skip.matches("x.model.visual.weight", CONFIG)

    def test_no_index_of_a_layer(self):
        with pytest.raises(ValueError, match="no group for the layer's index"):
            Skip(r"model\.mtp\..*", "layers that predict further tokens", further_layers=True)

    @pytest.mark.parametrize(("further", "skipped"), [(0, []), (1, [3]), (2, [3, 4])])
    def test_layers_that_predict_further_tokens(self, further, skipped):
        skip = Skip(r"model\.layers\.(\d+)\..*", "layers that predict further tokens", further_layers=True)
        config = dataclasses.replace(CONFIG, further_layers=further)
        matches = [skip.matches(f"model.layers.{i}.norm.weight", config) for i in range(13)]
        assert [i for i, match in enumerate(matches) if match] == skipped
