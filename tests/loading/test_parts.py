"""Reading onto a mesh: the same arrays as laid out from the whole, of no more bytes than devices need."""

import functools
import json
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from convert import orbax_io
from convert.conversion import to_orbax
from jetspec_jax import load_target
from jetspec_jax.checkpoint import reading
from jetspec_jax.checkpoint.orbax import read_orbax_weights
from jetspec_jax.checkpoint.parts import Placement, place, take_rows
from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config import parse_config, parse_model_config
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from jetspec_jax.device.partition import check_partition
from jetspec_jax.models import kept_packed
from jetspec_jax.models.mxfp4 import widen
from tests.decode.tiny import random_weights
from tests.families.goldens import FOLDER
from tests.loading.published import HEAD, V4, head_shapes, random_tensors, target_shapes, write
from tests.loading.test_gpt_oss import TINY as GPT_OSS
from tests.marks import wide
from tests.meshes import mesh_of

MESHES = ((1, 2), (2, 2), (1, 4))
# More parts than KV heads, and a vocabulary that does not divide.
FEW = {**V4, "num_key_value_heads": 1, "vocab_size": 21}
TIED = {**FEW, "tie_word_embeddings": True}


def assert_same(ours, theirs):
    for (path, own), other in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree.leaves(theirs), strict=True
    ):
        assert own.sharding == other.sharding, path
        assert own.dtype == other.dtype, path
        for mine, its in zip(own.addressable_shards, other.addressable_shards, strict=True):
            assert (mine.device, mine.index) == (its.device, its.index), path
            assert np.asarray(mine.data).tobytes() == np.asarray(its.data).tobytes(), path


def assert_read_as_placed(folder, config, mesh, dtype=None, *, whole=None):
    read = read_weights if whole is None else read_orbax_weights
    weights = read_weights(folder, config, dtype) if whole is None else whole
    assert_same(read(folder, config, dtype, mesh), place(weights, config, mesh))


def raw_of(folder):
    return json.loads((folder / "config.json").read_text())


def in_one(folder):
    """The tensors of a Qwen3-MoE checkpoint with all experts of a layer in one."""
    tensors = load_file(folder / "model.safetensors")
    layers = {name.split(".mlp.experts.")[0] for name in tensors if ".mlp.experts." in name}
    for layer in layers:
        own = f"{layer}.mlp.experts."
        count = sum(name.startswith(own) for name in tensors) // 3
        gate, up, down = (
            np.stack([tensors.pop(f"{own}{i}.{name}_proj.weight") for i in range(count)])
            for name in ("gate", "up", "down")
        )
        tensors[f"{own}gate_up_proj"] = np.concatenate([gate, up], axis=1)
        tensors[f"{own}down_proj"] = down
    return tensors


def packed(folder, **changes):
    """A GPT-OSS with experts in MXFP4, and what it would be as other files hold it."""
    raw = {**GPT_OSS, "num_local_experts": 4, "intermediate_size": 64, **changes}
    config = parse_model_config(raw)
    save_checkpoint(folder / "plain", raw, random_weights(config, 0), dtype="float32")
    plain = load_file(folder / "plain" / "model.safetensors")
    tensors, rng = dict(plain), np.random.default_rng(1)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = rng.integers(256, size=(experts, outputs, inputs // 32, 16), dtype=np.uint8)
        scales = rng.integers(122, 125, size=blocks.shape[:3], dtype=np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = np.ascontiguousarray(widen(blocks, scales).swapaxes(1, 2))
    unpacked = {key: value for key, value in raw.items() if key != "quantization_config"}
    return (
        config,
        write(folder / "packed", raw, tensors),
        write(folder / "wide", unpacked, plain),
    )


# A mixture, and sinks with biases.
IN_SHORT = ("qwen3_moe", "gpt_oss")
IN_FULL = ("gemma4", "qwen3_5", "step3p7")


class TestRead:
    @pytest.mark.parametrize("family", [*IN_SHORT, *map(wide, IN_FULL)])
    def test_every_family(self, family):
        config = parse_config(raw_of(FOLDER / family))
        fitting = 0
        for shape in MESHES:
            mesh = mesh_of(*shape)
            try:
                check_partition(config, mesh)
            except ValueError:
                continue
            fitting += 1
            assert_read_as_placed(FOLDER / family, config, mesh)
        assert fitting

    @pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
    def test_experts_in_one_tensor(self, tmp_path, shape):
        golden = FOLDER / "qwen3_moe"
        config = parse_config(raw_of(golden))
        folder = write(tmp_path / "it", raw_of(golden), in_one(golden))
        whole = read_weights(golden, config)
        assert_same(
            read_weights(folder, config, None, mesh_of(*shape)), place(whole, config, mesh_of(*shape))
        )

    @pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
    def test_mxfp4(self, tmp_path, shape):
        config, folder, unpacked = packed(tmp_path)
        dtype, mesh = jnp.dtype(jnp.float32), mesh_of(*shape)
        ours = read_weights(folder, config, dtype, mesh)
        assert_same(ours, place(read_weights(unpacked, config, dtype), config, mesh))

    @pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
    def test_mxfp4_that_stays_packed(self, tmp_path, shape):
        config, folder, _ = packed(tmp_path)
        config, mesh = kept_packed(config), mesh_of(*shape)
        assert_read_as_placed(folder, config, mesh, jnp.dtype(jnp.float32))

    @pytest.mark.parametrize("raw", [FEW, TIED, {**HEAD, "vocab_size": 21}], ids=["few", "tied", "head"])
    @pytest.mark.parametrize("dtype", [None, "bfloat16"])
    def test_repeated_heads_and_padding(self, tmp_path, raw, dtype):
        shapes = head_shapes(raw) if "dflash_config" in raw else target_shapes(raw)
        folder = write(tmp_path / "it", raw, random_tensors(shapes))
        for shape in MESHES[::2]:
            dtype = None if dtype is None else jnp.dtype(dtype)
            assert_read_as_placed(folder, parse_config(raw), mesh_of(*shape), dtype)


class TestBytes:
    @pytest.mark.parametrize("folder", [DEMO_TARGET, DEMO_DRAFT_HEAD], ids=["target", "head"])
    def test_a_device_reads_its_part(self, monkeypatch, folder):
        read = 0

        def counting(*arguments):
            nonlocal read
            rows = take_rows(*arguments)
            read += rows.nbytes
            return rows

        def put_first(self, parameter, make):
            part = self.parts(parameter)[0]
            return make(part.rows, part.shape)

        monkeypatch.setattr(reading, "take_rows", counting)
        monkeypatch.setattr(Placement, "put", put_first)
        source = Source(folder)
        read_weights(source.folder, source.config, None, mesh_of(1, 2))
        total = sum(path.stat().st_size for path in source.folder.glob("*.safetensors"))
        assert 0.45 * total < read < 0.55 * total

    @pytest.mark.wide
    def test_the_host_holds_a_part_at_a_time(self, tmp_path, monkeypatch):
        """What is stored of it, and its conversion, for which there is room; of a whole one there is not."""
        raw = {
            **V4,
            "hidden_size": 512,
            "intermediate_size": 4096,
            "vocab_size": 4096,
            "num_hidden_layers": 2,
        }
        raw["max_window_layers"] = 2
        tensors = random_tensors(target_shapes(raw))
        largest = 2 * tensors["model.layers.0.mlp.up_proj.weight"].nbytes
        folder, mesh = write(tmp_path / "target", raw, tensors), mesh_of(1, 4)
        del tensors
        # A CPU's devices would take over the very memory that was read.
        device_put = jax.device_put
        monkeypatch.setattr(jax, "device_put", lambda x, *where: device_put(jnp.array(x, copy=True), *where))
        load_target(folder, dtype="bfloat16", mesh=mesh)  # whatever is imported or compiled once
        tracemalloc.start()
        try:
            jax.block_until_ready(load_target(folder, dtype="bfloat16", mesh=mesh).weights)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 2 * largest / 4


class TestOrbax:
    @pytest.mark.parametrize("family", ["qwen3_next", wide("gpt_oss"), wide("gemma4")])
    def test_families(self, tmp_path, monkeypatch, family):
        monkeypatch.setattr(orbax_io, "CHUNK_BYTES", 300)
        to_orbax(FOLDER / family, tmp_path / "orbax")
        config = parse_config(raw_of(FOLDER / family))
        whole = read_weights(FOLDER / family, config)
        assert_read_as_placed(tmp_path / "orbax", config, mesh_of(1, 2), whole=whole)

    @pytest.mark.parametrize("raw", [FEW, HEAD], ids=["few", "head"])
    def test_repeated_heads_and_padding(self, tmp_path, raw):
        shapes = head_shapes(raw) if "dflash_config" in raw else target_shapes(raw)
        folder = write(tmp_path / "it", raw, random_tensors(shapes))
        to_orbax(folder, tmp_path / "orbax")
        config, dtype = parse_config(raw), jnp.dtype(jnp.bfloat16)
        whole = read_weights(folder, config, dtype)
        for shape in MESHES[::2]:
            assert_read_as_placed(tmp_path / "orbax", config, mesh_of(*shape), dtype, whole=whole)


class TestRefused:
    @pytest.fixture
    def no_weights_are_read(self, monkeypatch):
        def fail(*_, **__):
            raise AssertionError("weights were read")

        monkeypatch.setattr(reading.StoredParameters, "_fill", fail)

    @pytest.mark.usefixtures("no_weights_are_read")
    def test_cut_blocks(self, tmp_path):
        config, folder, _ = packed(tmp_path)
        message = (
            r"4 devices cannot split the weights: mlp\.experts\.down_proj: parts of 16 values cut "
            r"MXFP4 blocks of 32 \(layers 0-1\); .*expert_parallel_size"
        )
        with pytest.raises(ValueError, match=message):
            read_weights(folder, config, None, mesh_of(1, 4))

    @pytest.mark.usefixtures("no_weights_are_read")
    def test_what_does_not_divide(self, tmp_path):
        raw = {**V4, "num_key_value_heads": 4, "intermediate_size": 21}
        folder = write(tmp_path / "it", raw, random_tensors(target_shapes(raw)))
        with pytest.raises(ValueError, match=r"21 features of the dense block over 2 parts \(layers 0-2\)"):
            load_target(folder, mesh=mesh_of(1, 2))

    def test_another_head_than_the_tied_one(self, tmp_path, monkeypatch):
        """Each process compares its own rows, of which 0 to 10 are the first device's."""
        tensors = random_tensors(target_shapes(TIED))
        local_parts = Placement.local_parts
        for row in (0, 10, 11, 20):
            head = tensors["model.embed_tokens.weight"].copy()
            head[row] += 1
            folder = write(tmp_path / str(row), TIED, tensors, {"lm_head.weight": head})
            load = functools.partial(read_weights, folder, parse_config(TIED), None, mesh_of(1, 2))
            with pytest.raises(ValueError, match=r"lm_head\.weight is not model\.embed_tokens\.weight"):
                load()
            with monkeypatch.context() as patch:
                patch.setattr(
                    Placement, "local_parts", lambda self, parameter: local_parts(self, parameter)[:1]
                )
                patch.setattr(Placement, "put", lambda *_: None)
                if row <= 10:
                    with pytest.raises(ValueError, match=r"lm_head\.weight is not"):
                        load()
                else:
                    load()
