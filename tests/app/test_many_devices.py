"""`LLM` and the commands on several devices: the tokens of one, and what cannot be asked for."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jetspec_jax import LLM, Head, SamplingParams, Target, generate_tree, load_draft_head, load_target
from jetspec_jax.checkpoint import loading
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.cli import command
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.device.groups import meshes_for
from jetspec_jax.engine import engine as engines
from tests.decode.tiny import TINY, head_config, save_tiny_pair
from tests.marks import wide
from tests.meshes import mesh_of, need_devices

MIXTURE = Path(__file__).parents[1] / "families" / "goldens" / "qwen3_moe"
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5] * 140]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=1.0, seed=3, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.7, seed=4, min_p=0.01),
]
TREE = {"budget": 16, "width": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    need_devices(4)
    return save_tiny_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def loaded(folders):
    target = load_target(folders[0])
    return target, load_draft_head(folders[1], target=target)


@pytest.fixture(scope="module")
def expected(loaded):
    return tokens(generate_tree(*loaded, PROMPTS, PARAMS, **TREE))


def tokens(completions):
    return [completion.token_ids for completion in completions]


def one_axis():
    return Mesh(np.asarray(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Explicit,))


class TestTokens:
    @pytest.mark.parametrize(
        ("places", "devices"),
        [
            (lambda: {"tensor_parallel_size": 2}, [(0, 1)]),
            (lambda: {"mesh": one_axis()}, [(0, 1)]),
            wide(lambda: {"data_parallel_size": 2}, [(0,), (1,)]),
        ],
        ids=["sizes", "one explicit axis", "copies"],
    )
    def test_are_those_of_one_device(self, folders, expected, places, devices):
        llm = LLM(*folders, **TREE, **places())
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected
        for mesh, head, ids in zip(llm.target.meshes, llm.draft_head.meshes, devices, strict=True):
            assert mesh == head
            assert tuple(device.id for device in mesh.devices.flat) == ids
        weights = jax.tree.leaves(llm.target.weights)
        assert {tuple(sorted(device.id for device in leaf.devices())) for leaf in weights} == {devices[0]}
        for ids in devices:
            assert f"(devices {', '.join(map(str, ids))})" in repr(llm)

    def test_nothing_asked_for_is_no_mesh(self, folders):
        sizes = dict.fromkeys(("tensor_parallel_size", "expert_parallel_size", "data_parallel_size"), 1)
        llm = LLM(*folders, mesh=None, **sizes)
        assert llm.target.meshes == llm.draft_head.meshes == (None,)
        assert "mesh" not in repr(llm)

    @pytest.mark.wide
    def test_loaded_models_stay_where_they_are(self, folders, expected):
        target = load_target(folders[0], mesh=one_axis())
        head = load_draft_head(folders[1], target=target)
        for asked in ({}, {"mesh": mesh_of(1, 2)}, {"tensor_parallel_size": 2}):
            llm = LLM(target, head, **TREE, **asked)
            assert (llm.target, llm.draft_head) == (target, head)
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected

    def test_devices_that_are_left_over_are_said(self, folders, caplog):
        LLM(folders[0], tensor_parallel_size=2)
        there = len(jax.devices())
        said = [one.message for one in caplog.records if "devices" in one.message]
        assert said == [f"decoding on the first 2 of {there} devices"]
        caplog.clear()
        LLM(folders[0], mesh=one_axis())
        LLM(folders[0])
        assert not [one for one in caplog.records if "devices" in one.message]


class TestMeshesOfCallers:
    """Any mesh whose axes are known, of any type and in any order, is the mesh that programs name."""

    @pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
    @pytest.mark.parametrize("axes", [("tensor",), ("expert", "tensor"), ("tensor", "expert")])
    def test_makes_the_same_decoder_and_the_same_models(self, axes, axis_type):
        shape = [2 if axis == "tensor" else 1 for axis in axes]
        mesh = jax.make_mesh(shape, axes, axis_types=(axis_type,) * len(axes), devices=jax.devices()[:2])
        assert TreeDecoder(TINY, mesh=mesh) == TreeDecoder(TINY, mesh=mesh_of(1, 2))
        assert Target(TINY, {}, mesh=mesh).mesh == Head(head_config(TINY), {}, mesh).mesh == mesh_of(1, 2)

    def test_an_unknown_axis_is_named(self):
        mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        with pytest.raises(ValueError, match=r"mesh has the axes \['data'\]"):
            TreeDecoder(TINY, mesh=mesh)


@pytest.mark.usefixtures("no_type_checks")
class TestWhatCannotBe:
    @pytest.fixture(autouse=True)
    def nothing_is_read(self, monkeypatch, loaded):
        def fail(*_, **__):
            raise AssertionError("work began before everything was checked")

        for owner, name in ((loading, "_read"), (engines, "Runner")):
            monkeypatch.setattr(owner, name, fail)

    def refused(self, folders, kind, *parts, **asked):
        with pytest.raises(kind) as caught:
            LLM(*folders, **TREE, **asked)
        for part in parts:
            assert part in str(caught.value)

    def test_sizes_that_are_none(self, folders):
        self.refused(
            folders,
            TypeError,
            "tensor_parallel_size must be at least 1, not 0",
            "expert_parallel_size must be an integer, not 2.5",
            "data_parallel_size must be an integer, not True",
            tensor_parallel_size=0,
            expert_parallel_size=2.5,
            data_parallel_size=True,
        )

    def test_more_than_there_is(self, folders):
        there = len(jax.devices())
        self.refused(
            folders,
            ValueError,
            f"tensor_parallel_size 4 x expert_parallel_size 2 x data_parallel_size {there} needs {8 * there} "
            f"devices, and there are {there}; possible: 1 x 1 x 1, 2 x 1 x 1, 4 x 1 x 1, 1 x 1 x 2,",
            "8 devices cannot split the model: 2 KV heads for 4 query heads over 8 parts (layers 0-1)",
            "expert_parallel_size above 1 is for models with experts",
            tensor_parallel_size=4,
            expert_parallel_size=2,
            data_parallel_size=there,
        )
        self.refused(folders, ValueError, "needs 1000000000000", tensor_parallel_size=10**12)

    def test_layers_that_cannot_be_split(self, folders):
        said = "3 devices cannot split the model: 2 KV heads for 4 query heads over 3 parts (layers 0-1)"
        self.refused(folders, ValueError, said, tensor_parallel_size=3)
        mesh = Mesh(np.asarray(jax.devices()[:3]), ("tensor",))
        self.refused(folders, ValueError, said, mesh=mesh)

    def test_a_mesh_beside_sizes_and_with_axes_that_nobody_knows(self, folders):
        mesh = Mesh(np.asarray(jax.devices()[:2]), ("model",))
        self.refused(
            folders,
            ValueError,
            "give mesh or tensor_parallel_size and data_parallel_size, not both",
            "mesh has the axes ['model']; only expert and tensor are known",
            mesh=mesh,
            tensor_parallel_size=2,
            data_parallel_size=2,
        )
        self.refused(folders, TypeError, "mesh must be a jax.sharding.Mesh, not 2", mesh=2)

    def test_loaded_models_that_lie_elsewhere(self, folders, loaded):
        target, head = loaded
        self.refused(
            (folders[0], head),
            ValueError,
            "the draft head lies on one device and the target on a mesh of expert 1 x tensor 2 (devices 0,",
            mesh=one_axis(),
        )
        away = Head(head.config, head.weights, mesh_of(1, 2))
        self.refused((target, away), ValueError, "and the target on one device: load both with the same mesh")
        self.refused(
            (target, away),
            ValueError,
            "the loaded target lies on one device",
            "the draft head lies on a mesh",
            data_parallel_size=2,
        )

    def test_a_head_without_the_target_s_copies(self, loaded):
        target, head = loaded
        there = Target(TINY, target.weights, mesh=mesh_of(1, 1))
        several = Target(TINY, target.weights, mesh=mesh_of(1, 1), copies=(there,))
        lone = Head(head.config, head.weights, mesh_of(1, 1))
        with pytest.raises(ValueError, match=r"lies on .* \(devices 0\) and the target on .* and a mesh of"):
            generate_tree(several, lone, PROMPTS)

    def test_copies_in_several_processes(self, folders, monkeypatch):
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        said = "data_parallel_size 2 in 2 processes: .* start one job per host behind one balancer"
        with pytest.raises(ValueError, match=said):
            meshes_for(TINY, data_parallel_size=2)
        assert len(meshes_for(TINY, tensor_parallel_size=2)) == 1


def test_experts_by_number_and_by_features():
    config = Source(MIXTURE).target_config
    [mesh] = meshes_for(config, tensor_parallel_size=2, expert_parallel_size=2)
    assert dict(mesh.shape) == {"expert": 2, "tensor": 2}
    with pytest.raises(ValueError, match=r"8 experts over 3 parts"):
        meshes_for(config, expert_parallel_size=3)


class TestCommands:
    def run(self, capsys, folders, *words):
        code = command.main([words[0], "--target", folders[0], "--draft-head", folders[1], *words[1:]])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    @pytest.mark.wide
    def test_tree(self, folders, expected, capsys):
        words = ("--token-ids", "3,1,4,1,5", "--max-tokens", "24", "--budget", "16", "--width", "3", "--json")
        places = ("--expert-parallel-size", "1", "--tensor-parallel-size", "2")
        code, out, _ = self.run(capsys, folders, "tree", *words, "--ignore-eos", *places)
        assert code == 0
        committed = [token for one in json.loads(out)["rounds"] for token in one["committed"]]
        assert committed[:24] == expected[0]
        code, _, err = self.run(capsys, folders, "tree", *words, "--data-parallel-size", "2")
        assert code == 2
        assert "--data-parallel-size 2: one prompt can only use one copy" in err
