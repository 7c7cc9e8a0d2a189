import dataclasses
import json
import shutil

import numpy as np
import pytest

from convert import command, outputs
from convert.conversion import to_huggingface, to_orbax
from convert.folders import locate
from convert.orbax_io import read_orbax, write_orbax
from convert.verification import verify
from jetspec_jax import draft_logits, load_draft_head, load_target, logits
from tests.convert.checkpoints import (
    DRAFT,
    TIED,
    UNTIED,
    make,
    of_any_bits,
    random_bits,
    random_values,
    shapes_of,
)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a head in both layouts, as converted; tests that change one work on a copy."""
    place = tmp_path_factory.mktemp("pair")
    for name, raw in (("target", UNTIED), ("head", DRAFT)):
        make(place / name, raw, random_values(shapes_of(raw), "bfloat16"))
        # Not a tokenizer's file, so that the library loads the folder.
        (place / name / "special_tokens_map.json").unlink()
        to_orbax(place / name, place / f"{name}-orbax")
        to_huggingface(place / f"{name}-orbax", place / f"{name}-back")
    return place


def flip(folder, name, bit=0):
    """Flips a bit of the first element of a stored tensor."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    begin = json.loads(content[8 : 8 + length])[name]["data_offsets"][0]
    content[8 + length + begin + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


class TestRight:
    @pytest.mark.parametrize("name", ["target", "head"])
    def test_both_ways(self, pair, name):
        for source, destination in ((name, f"{name}-orbax"), (f"{name}-orbax", f"{name}-back")):
            found = verify(pair / source, pair / destination)
            assert found.ok
            assert found.largest_difference == 0
            assert (found.differing, found.differing_files) == ((), ())
            assert found.parameters == {"target": 19, "head": 11}[name]

    @pytest.mark.wide
    def test_with_a_target_of_either_layout(self, pair):
        for target in ("target", "target-orbax"):
            found = verify(pair / "head", pair / "head-orbax", target=pair / target)
            assert found.ok
            assert found.compared == "draft logits"

    @pytest.mark.parametrize(
        ("way", "dtype"),
        [
            # Programs of one type are shared.
            (to_orbax, "bfloat16"),
            (to_huggingface, "bfloat16"),
        ],
    )
    def test_rounded(self, tmp_path, dtype, way):
        source = make(tmp_path / "source", TIED, random_values(shapes_of(TIED)))
        if way is to_huggingface:
            to_orbax(source, tmp_path / "orbax")
            source = tmp_path / "orbax"
        way(source, tmp_path / "rounded", dtype=dtype)
        found = verify(source, tmp_path / "rounded", dtype=dtype)
        assert found.ok
        assert 0 < found.relative_difference < 0.1
        # Without the word the change of type is a difference.
        assert not verify(source, tmp_path / "rounded").ok

    @pytest.mark.wide
    def test_the_outputs_are_the_models(self, pair):
        """What is compared is what the library computes, so that a difference there shows here."""
        target = load_target(pair / "target", dtype="float32")
        head = load_draft_head(pair / "head", dtype="float32")
        tokens = outputs.fixed_tokens(target.config)
        ours = outputs.outputs_of(locate(pair / "target"), None)(read_orbax(pair / "target-orbax"))
        np.testing.assert_allclose(ours, logits(target, np.asarray(tokens)), rtol=1e-4, atol=1e-4)
        compute = outputs.outputs_of(locate(pair / "head"), locate(pair / "target"))
        drafted = draft_logits(target, head, np.asarray(tokens)[:, [*range(tokens.shape[1]), 0]])
        ours = compute(read_orbax(pair / "head-orbax"))
        np.testing.assert_allclose(ours, drafted, rtol=1e-4, atol=1e-4)


class TestWrong:
    @pytest.mark.parametrize("bit", [0, 15], ids=["last-digit", "sign"])
    def test_a_bit_of_safetensors(self, tmp_path, pair, bit):
        shutil.copytree(pair / "target-back", tmp_path / "back")
        flip(tmp_path / "back", "model.layers.1.mlp.up_proj.weight", bit)
        found = verify(pair / "target-orbax", tmp_path / "back")
        assert found.differing == ("layers.1.mlp.gate_up_proj",)
        assert not found.ok

    def test_the_sign_of_a_zero(self, tmp_path):
        tensors = random_values(shapes_of(DRAFT))
        tensors["fc.weight"][0, 0] = 0.0
        make(tmp_path / "source", DRAFT, tensors)
        to_orbax(tmp_path / "source", tmp_path / "orbax")
        flip(tmp_path / "source", "fc.weight", 31)
        found = verify(tmp_path / "source", tmp_path / "orbax")
        assert found.differing == ("fc",)
        assert found.largest_difference == 0
        assert not found.ok

    def test_a_bit_of_orbax(self, tmp_path, pair):
        weights = read_orbax(pair / "head-orbax")
        weights["norm"]["weight"].view(np.uint16)[3] ^= 1
        files = {"config.json": (pair / "head-orbax" / "config.json").read_bytes()}
        write_orbax(tmp_path / "orbax", "draft head", files, weights)
        found = verify(pair / "head", tmp_path / "orbax")
        assert found.differing == ("norm.weight",)
        assert found.largest_difference > 0
        assert "tokenizer.model" in found.differing_files
        assert not found.ok

    def test_a_file(self, tmp_path, pair):
        shutil.copytree(pair / "head-back", tmp_path / "back")
        (tmp_path / "back" / "chat_template.jinja").write_text("other")
        found = verify(pair / "head-orbax", tmp_path / "back")
        assert found.differing_files == ("chat_template.jinja",)
        assert not found.ok

    def test_values_that_are_not_finite(self, tmp_path):
        """The bits are right, and yet the model does not compute: that must not pass in silence."""
        source = of_any_bits(make(tmp_path / "source", DRAFT, random_bits(shapes_of(DRAFT), "bfloat16")))
        to_orbax(source, tmp_path / "orbax")
        found = verify(source, of_any_bits(tmp_path / "orbax"))
        assert not found.differing
        assert not found.finite
        assert not found.ok

    def test_the_rule(self, pair):
        """Equal outputs without a type named; with one, outputs that have something to do with each other."""
        right = verify(pair / "head", pair / "head-orbax")
        close = dataclasses.replace(right, relative_difference=0.01)
        assert not close.ok
        assert dataclasses.replace(close, same_type=False).ok
        assert not dataclasses.replace(close, same_type=False, relative_difference=1.4).ok
        assert not dataclasses.replace(right, relative_difference=float("nan")).ok

    def test_another_config(self, tmp_path, pair):
        make(tmp_path / "tied", TIED, random_values(shapes_of(TIED)))
        with pytest.raises(ValueError, match="has another config than"):
            verify(tmp_path / "tied", pair / "target-orbax")

    def test_one_layout(self, pair):
        with pytest.raises(ValueError, match="both of the layout huggingface"):
            verify(pair / "target", pair / "target-back")

    def test_targets_that_are_none(self, pair):
        with pytest.raises(ValueError, match="is a target: only a draft head is verified with a target"):
            verify(pair / "target", pair / "target-orbax", target=pair / "target")
        with pytest.raises(ValueError, match="is a draft head; a target is needed"):
            verify(pair / "head", pair / "head-orbax", target=pair / "head")

    def test_a_target_that_does_not_fit(self, tmp_path, pair):
        make(tmp_path / "other", {**UNTIED, "vocab_size": 29}, {})
        with pytest.raises(
            ValueError, match=r"does not fit the target: .*vocabulary of 19, the target's has 29"
        ):
            verify(pair / "head", pair / "head-orbax", target=tmp_path / "other")


class TestCommand:
    def test_passes(self, tmp_path, pair, capsys):
        arguments = [pair / "head", tmp_path / "orbax", "--verify", "--target", pair / "target"]
        assert command.main(list(map(str, arguments))) == 0
        out = capsys.readouterr().out
        assert "verify: all 11 parameters are equal, bit for bit\n" in out
        assert "verify: draft logits: largest difference 0, relative 0\n" in out
        assert out.endswith("verify: passed\n")

    def test_fails(self, tmp_path, pair, capsys, monkeypatch):
        def badly(source, destination, **settings):
            done = to_huggingface(source, destination, **settings)
            flip(done.destination, "layers.0.self_attn.v_proj.weight")
            return done

        monkeypatch.setattr(command, "to_huggingface", badly)
        assert command.main([str(pair / "head-orbax"), str(tmp_path / "back"), "--verify"]) == 1
        out = capsys.readouterr().out
        assert "1 of 11 parameters differ: layers.0.self_attn.qkv_proj\n" in out
        assert out.endswith("verify: FAILED\n")
