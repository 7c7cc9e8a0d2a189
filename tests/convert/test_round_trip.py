import jax
import numpy as np
import pytest

from convert.command import main
from convert.conversion import to_huggingface, to_orbax
from convert.orbax_io import read_orbax
from convert.verification import verify
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from tests.convert.checkpoints import (
    DRAFT,
    DTYPES,
    OTHER_FILES,
    SELECTING,
    TIED,
    UNTIED,
    files_of,
    make,
    of_any_bits,
    random_bits,
    random_values,
    read_raw,
    shapes_of,
)
from tests.marks import wide


def assert_same_bits(weights, others):
    assert jax.tree.structure(weights) == jax.tree.structure(others)
    for ours, theirs in zip(jax.tree.leaves(weights), jax.tree.leaves(others), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == theirs.tobytes()


class TestThereAndBack:
    @pytest.mark.parametrize(
        ("raw", "dtype", "sharded"),
        [
            (UNTIED, "float32", True),
            (TIED, "float16", False),
            (SELECTING, "bfloat16", True),
        ],
        ids=["untied-f32-shards", "tied-f16", "selector-bf16-shards"],
    )
    def test_every_bit(self, tmp_path, raw, dtype, sharded):
        source = make(tmp_path / "source", raw, random_bits(shapes_of(raw), dtype), sharded)
        done = to_orbax(of_any_bits(source), tmp_path / "orbax")
        to_huggingface(of_any_bits(tmp_path / "orbax"), tmp_path / "back")
        to_orbax(of_any_bits(tmp_path / "back"), tmp_path / "again")

        assert read_raw(tmp_path / "back") == read_raw(source)
        weights = read_orbax(of_any_bits(tmp_path / "orbax"))
        assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {DTYPES[dtype]}
        assert done.nbytes == sum(len(content) for _, _, content in read_raw(source).values())
        assert_same_bits(read_orbax(of_any_bits(tmp_path / "again")), weights)

        kept = {"config.json": (source / "config.json").read_bytes(), **OTHER_FILES}
        assert files_of(tmp_path / "back") == kept
        orbax = {k: v for k, v in files_of(tmp_path / "orbax").items() if not k.startswith("weights/")}
        assert orbax.pop("orbax.json")
        assert orbax == kept

    @pytest.mark.parametrize(
        ("folder", "options"),
        [(DEMO_DRAFT_HEAD, ()), wide(DEMO_TARGET, ("--verify",))],
        ids=["draft-head", "target-verified"],
    )
    def test_the_demo_pair(self, tmp_path, folder, options, capsys):
        assert main([str(folder), str(tmp_path / "orbax"), *options]) == 0
        said = "verify: all 66 parameters are equal, bit for bit\n" in capsys.readouterr().out
        assert said == bool(options)
        assert main([str(tmp_path / "orbax"), str(tmp_path / "back")]) == 0
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        assert {path.name: path.read_bytes() for path in (tmp_path / "back").iterdir()} == before

    def test_what_no_parameter_is_made_of(self, tmp_path, capsys):
        """A tied lm_head that is stored all the same, and old buffers, are left out and said to be."""
        tensors = random_values(shapes_of(TIED))
        buffers = [f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(5)]
        surplus = {
            "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
            **{name: np.ones(4, np.float32) for name in buffers},
        }
        source = make(tmp_path / "source", TIED, tensors | surplus)
        done = to_orbax(source, tmp_path / "orbax")
        to_huggingface(tmp_path / "orbax", tmp_path / "back")
        assert done.left_out == {
            "second copy of the tied embedding": ["lm_head.weight"],
            "buffers of older exporters, which follow from the config": buffers,
        }
        assert main([str(source), str(tmp_path / "printed")]) == 0
        assert capsys.readouterr().out.splitlines()[1:] == [
            "left out: lm_head.weight (second copy of the tied embedding)",
            f"left out: {', '.join(buffers[:3])} and 2 more "
            "(buffers of older exporters, which follow from the config)",
        ]
        assert read_raw(tmp_path / "back").keys() == tensors.keys()


class TestType:
    @pytest.mark.parametrize(
        ("way", "dtype"),
        [("orbax", "bfloat16"), ("huggingface", "float16")],
    )
    def test_is_given_to_all_parameters(self, tmp_path, way, dtype):
        tensors = random_values(shapes_of(DRAFT))
        make(tmp_path / "source", DRAFT, tensors)
        to_orbax(tmp_path / "source", tmp_path / "orbax", dtype=dtype if way == "orbax" else "stored")
        to_huggingface(
            tmp_path / "orbax", tmp_path / "back", dtype=dtype if way == "huggingface" else "stored"
        )
        back = read_raw(tmp_path / "back")
        expected = {name: tensor.astype(DTYPES[dtype]) for name, tensor in tensors.items()}
        assert back == {name: (x.dtype, x.shape, x.tobytes()) for name, x in expected.items()}

    @pytest.mark.wide
    def test_one_parameter_of_two(self, tmp_path):
        tensors = random_values(shapes_of(DRAFT))
        for name in ("layers.0.self_attn.k_proj.weight", "layers.0.mlp.up_proj.weight"):
            tensors[name] = tensors[name].astype(np.float16)
        source = make(tmp_path / "source", DRAFT, tensors)
        with pytest.raises(ValueError, match="different types; name one type for all") as info:
            to_orbax(source, tmp_path / "orbax")
        message = str(info.value)
        assert "--dtype" in message
        assert "layers.0.self_attn.q_proj.weight is F32, layers.0.self_attn.k_proj.weight is F16" in message
        assert "layers.0.mlp.gate_proj.weight is F32, layers.0.mlp.up_proj.weight is F16" in message
        assert not (tmp_path / "orbax").exists()
        to_orbax(source, tmp_path / "orbax", dtype="float32")
        weights = read_orbax(tmp_path / "orbax")
        assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {np.dtype(np.float32)}
        found = verify(source, tmp_path / "orbax", dtype="float32")
        assert found.ok
        assert found.largest_difference == 0

    @pytest.mark.parametrize("way", ["orbax", "huggingface"])
    def test_that_cannot_hold_a_value(self, tmp_path, way):
        tensors = random_values(shapes_of(DRAFT))
        tensors["layers.0.mlp.up_proj.weight"][3, 4] = 7e4
        source = make(tmp_path / "source", DRAFT, tensors)
        convert = to_orbax
        if way == "huggingface":
            to_orbax(source, tmp_path / "orbax")
            source, convert = tmp_path / "orbax", to_huggingface
        # The reader of safetensors names the tensor, and what is read from Orbax is a parameter.
        named = {"orbax": "layers.0.mlp.up_proj.weight", "huggingface": "layers.0.mlp.gate_up_proj"}[way]
        with pytest.raises(ValueError, match=named) as info:
            convert(source, tmp_path / "converted", dtype="float16")
        assert "not finite in float16" in str(info.value)
        assert not (tmp_path / "converted").exists()
