import json
import pickle
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jetspec_jax import load_draft_head, load_target
from jetspec_jax.checkpoint import reading, writing
from jetspec_jax.checkpoint.tensor_file import TensorFile
from jetspec_jax.checkpoint.tokenizer import read_eos_token_ids
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.inspect.describe import describe
from tests.decode.tiny import word_tokenizer
from tests.loading.published import (
    HEAD,
    SELECTING,
    V4,
    V5,
    halves,
    head_shapes,
    random_tensors,
    target_shapes,
    with_dflash,
    without,
    write,
    write_index,
)

TIED = {**V4, "tie_word_embeddings": True}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def assert_same_weights(weights, others):
    assert jax.tree.structure(weights) == jax.tree.structure(others)
    for ours, theirs in zip(jax.tree.leaves(weights), jax.tree.leaves(others), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.fixture
def head_folder(tmp_path):
    return write(tmp_path / "head", HEAD, random_tensors(head_shapes(HEAD)))


@pytest.fixture
def fetched(monkeypatch):
    """Names of the tensors that were read from any file, in order."""
    names = []
    real = TensorFile.tensor

    def spy(self, name):
        names.append(name)
        return real(self, name)

    monkeypatch.setattr(TensorFile, "tensor", spy)
    return names


class TestLayout:
    def test_target(self, folder, tensors):
        weights = load_target(folder, dtype="float32").weights
        attention = weights["layers"][1]["self_attn"]
        prefix = "model.layers.1.self_attn."
        # A linear layer is stored [out, in]; heads are consecutive rows of q and columns of o.
        q, k, v = (tensors[prefix + f"{name}_proj.weight"].reshape(-1, 8, 12) for name in "qkv")
        o = tensors[prefix + "o_proj.weight"].reshape(12, 4, 8)
        # Fused: in each of the two groups its two query heads, its key head and its value head.
        fused = np.stack([q[0], q[1], k[0], v[0], q[2], q[3], k[1], v[1]]).reshape(2, 4, 8, 12)
        np.testing.assert_array_equal(attention["qkv_proj"], np.einsum("grem->mgre", fused))
        np.testing.assert_array_equal(attention["o_proj"], np.einsum("mhe->hem", o))
        np.testing.assert_array_equal(attention["k_norm"]["weight"], tensors[prefix + "k_norm.weight"])
        np.testing.assert_array_equal(weights["embed_tokens"], tensors["model.embed_tokens.weight"])
        np.testing.assert_array_equal(weights["lm_head"], tensors["lm_head.weight"])
        down = tensors["model.layers.2.mlp.down_proj.weight"]
        np.testing.assert_array_equal(weights["layers"][2]["mlp"]["down_proj"], down.T)
        gate, up = (tensors[f"model.layers.2.mlp.{name}_proj.weight"] for name in ("gate", "up"))
        fused = np.stack([gate.T, up.T], axis=1)
        np.testing.assert_array_equal(weights["layers"][2]["mlp"]["gate_up_proj"], fused)

    def test_draft_head(self, head_folder):
        tensors = load_file(head_folder / "model.safetensors")
        weights = load_draft_head(head_folder, dtype="float32").weights
        np.testing.assert_array_equal(weights["fc"], tensors["fc.weight"].T)
        norm = tensors["layers.1.input_layernorm.weight"]
        np.testing.assert_array_equal(weights["layers"][1]["input_layernorm"]["weight"], norm)

    @pytest.mark.parametrize(
        ("raw", "dtype"),
        [
            (V4, "float32"),
            (V5, "bfloat16"),
            (TIED, "float16"),
            (HEAD, "float32"),
            (SELECTING, "bfloat16"),
        ],
    )
    def test_written_as_it_was_read(self, tmp_path, raw, dtype):
        is_head = "dflash_config" in raw
        shapes = (head_shapes if is_head else target_shapes)(raw)
        tensors = random_tensors(shapes, jnp.dtype(dtype))
        load = load_draft_head if is_head else load_target
        loaded = load(write(tmp_path / "theirs", raw, tensors), dtype=dtype)
        save_checkpoint(tmp_path / "ours", raw, loaded.weights, dtype=dtype)
        written = load_file(tmp_path / "ours" / "model.safetensors")
        assert {name: (x.shape, x.dtype) for name, x in written.items()} == {
            name: (x.shape, x.dtype) for name, x in tensors.items()
        }
        for name, tensor in tensors.items():
            assert written[name].tobytes() == tensor.tobytes(), name
        again = load(tmp_path / "ours", dtype=dtype)
        assert again.config == loaded.config
        assert_same_weights(again.weights, loaded.weights)

    @pytest.mark.parametrize(
        ("stored", "dtype"),
        [
            (np.float32, "bfloat16"),
            (np.float16, "float32"),
            (BFLOAT16, "float32"),
            (BFLOAT16, "float16"),
        ],
    )
    def test_stored_in_one_type_loaded_in_another(self, tmp_path, stored, dtype):
        tensors = random_tensors(target_shapes(V4), stored)
        weights = load_target(write(tmp_path / "target", V4, tensors), dtype=dtype).weights
        assert {x.dtype for x in jax.tree.leaves(weights)} == {jnp.dtype(dtype)}
        expected = tensors["lm_head.weight"].astype(jnp.dtype(dtype))
        np.testing.assert_array_equal(np.asarray(weights["lm_head"]), expected)

    @pytest.mark.parametrize("stored", [np.float32, BFLOAT16])
    def test_what_float16_cannot_hold(self, tmp_path, stored):
        """Its largest number is 65504, and what lies nearer to it than to 65536 is rounded to it."""
        tensors = random_tensors(target_shapes(V4), stored)
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name][2, 3] = 65504 if stored is np.float32 else 65280
        folder = write(tmp_path / "largest", V4, tensors)
        mlp = load_target(folder, dtype="float16").weights["layers"][1]["mlp"]
        assert jnp.isfinite(mlp["gate_up_proj"]).all()
        tensors[name][2, 3] = -65536
        folder = write(tmp_path / "beyond", V4, tensors)
        complaint = f"{name} holds values that are not finite in float16"
        with pytest.raises(ValueError, match=complaint):
            load_target(folder, dtype="float16")
        load_target(folder, dtype="bfloat16")


class TestShards:
    @pytest.fixture
    def sharded(self, tmp_path, tensors):
        return write(tmp_path / "sharded", V4, *halves(tensors))

    def test_are_one_checkpoint(self, tmp_path, folder, sharded, tensors):
        """Two, one with an index, and two without one; files outside an index are left alone."""
        whole = load_target(folder).weights
        (sharded / "adapter.safetensors").write_bytes(b"junk")
        one = write(tmp_path / "one", V4, tensors, index=True)
        for name, part in zip(("model", "more"), halves(tensors), strict=True):
            save_file(part, folder / f"{name}.safetensors")
        for place, files in ((sharded, 3), (one, 1), (folder, 2)):
            assert len(list(place.glob("*.safetensors"))) == files
            assert_same_weights(load_target(place).weights, whole)

    def test_absent_shard(self, sharded):
        (sharded / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(ValueError, match=r"index names shards .*'model-00002-of-00002.safetensors'"):
            load_target(sharded)

    def test_absent_tensor(self, sharded):
        listing = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
        write_index(sharded, {**listing, "ghost.weight": "model-00001-of-00002.safetensors"})
        with pytest.raises(ValueError, match=r"index names tensors that no shard holds: \['ghost.weight'\]"):
            load_target(sharded)

    @pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": ["a"]}'])
    def test_broken_index(self, sharded, content):
        (sharded / "model.safetensors.index.json").write_text(content)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json"):
            load_target(sharded)


class TestTensors:
    @pytest.mark.parametrize("sharded", [False, True])
    def test_all_that_is_wrong_is_said_at_once(self, tmp_path, tensors, fetched, sharded):
        wrong = without(tensors, "model.layers.1.mlp.up_proj.weight", "model.norm.weight")
        wrong["model.layers.3.mlp.up_proj.weight"] = np.zeros((20, 12), np.float32)
        wrong["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
        wrong["model.layers.2.self_attn.o_proj.weight"] = np.zeros((32, 12), np.float32)  # transposed
        wrong["model.embed_tokens.weight"] = np.zeros((19, 12), np.int8)
        shards = halves(wrong) if sharded else [wrong]
        with pytest.raises(ValueError, match="does not hold the tensors of its config") as info:
            load_target(write(tmp_path / "wrong", V4, *shards))
        message = str(info.value)
        for complaint in (
            "missing: model.layers.1.mlp.up_proj.weight",
            "missing: model.norm.weight",
            "surplus: model.layers.3.mlp.up_proj.weight",
            "surplus: model.layers.0.self_attn.q_proj.bias",
            "misshapen: model.layers.2.self_attn.o_proj.weight is [32, 12], expected [12, 32]",
            "unsupported type: model.embed_tokens.weight is I8",
        ):
            assert complaint in message
        assert len(message.splitlines()) == 7
        assert not fetched

    def test_stored_twice(self, tmp_path, tensors, fetched):
        shards = halves(tensors)
        for shard in shards:
            for name in ("model.embed_tokens.weight", "model.norm.weight"):
                shard[name] = tensors[name]
        with pytest.raises(ValueError, match="more than one file") as info:
            load_target(write(tmp_path / "twice", V4, *shards))
        assert "model.embed_tokens.weight" in str(info.value)
        assert "model.norm.weight" in str(info.value)
        assert not fetched

    def test_a_selector_of_tensors_or_of_keys_alone(self, tmp_path):
        with pytest.raises(ValueError, match=r"missing: candidate_selector\.predecessor_codebook") as info:
            load_draft_head(write(tmp_path / "keys", SELECTING, random_tensors(head_shapes(HEAD))))
        assert str(info.value).count("missing: candidate_selector") == 3
        with pytest.raises(ValueError, match=r"surplus: candidate_selector\.predecessor_codebook") as info:
            load_draft_head(write(tmp_path / "tensors", HEAD, random_tensors(head_shapes(SELECTING))))
        assert "3 of the surplus tensors are those of a selector" in str(info.value)

    def test_a_head_with_other_taps(self, tmp_path):
        folder = write(
            tmp_path / "head", with_dflash(target_layer_ids=[0]), random_tensors(head_shapes(HEAD))
        )
        with pytest.raises(ValueError, match=r"misshapen: fc.weight is \[12, 24\], expected \[12, 12\]"):
            load_draft_head(folder)

    def test_rotary_buffers_of_older_exporters(self, tmp_path, folder, tensors, caplog):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        older = load_target(write(tmp_path / "older", V4, tensors))
        [line] = caplog.messages
        assert line.endswith(
            "older: tensors left unread: 1 (buffers of older exporters, which follow from the config)"
        )
        assert_same_weights(older.weights, load_target(folder).weights)

    @pytest.mark.parametrize("stored", [False, True])
    def test_tied(self, tmp_path, stored, caplog):
        tensors = random_tensors(target_shapes(TIED))
        if stored:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        target = load_target(write(tmp_path / "tied", TIED, tensors), dtype="float32")
        assert target.config.tie_word_embeddings
        assert "lm_head" not in target.weights
        assert caplog.messages == []  # nothing that was stored is lost
        np.testing.assert_array_equal(target.weights["embed_tokens"], tensors["model.embed_tokens.weight"])

    @pytest.mark.parametrize("dtype", ["float32", "float16"])
    def test_tied_and_stored_in_another_type(self, tmp_path, dtype):
        tensors = random_tensors(target_shapes(TIED), np.float16)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].astype(dtype)
        tensors["lm_head.weight"][2, 3] = tensors["model.embed_tokens.weight"][2, 3] = np.nan
        folder = write(tmp_path / "tied", TIED, tensors)
        target = load_target(folder, dtype="float32", allow_nonfinite=True)
        np.testing.assert_array_equal(target.weights["embed_tokens"], tensors["model.embed_tokens.weight"])

    # The first and the last rows, with all rows in one part, with some in each, and with one.
    @pytest.mark.parametrize("row", [0, 18])
    @pytest.mark.parametrize("part", [2**20, 4 * 12 * 4, 1])
    def test_tied_and_another_head_stored(self, tmp_path, monkeypatch, row, part):
        monkeypatch.setattr(reading, "_COMPARED_BYTES", part)
        tensors = random_tensors(target_shapes(TIED))
        head = {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
        load_target(write(tmp_path / "tied", TIED, tensors, head))
        head["lm_head.weight"][row, -1] += 1e-3
        folder = write(tmp_path / "differs", TIED, tensors, head)
        message = (
            rf"{folder}: lm_head\.weight is not model\.embed_tokens\.weight, and the config ties them; .*"
            "set tie_word_embeddings: false in config.json"
        )
        with pytest.raises(ValueError, match=message):
            load_target(folder)
        # What the message says to do is right.
        (folder / "config.json").write_text(json.dumps(V4))
        np.testing.assert_array_equal(
            load_target(folder, dtype="float32").weights["lm_head"], head["lm_head.weight"]
        )

    @pytest.mark.parametrize(
        ("head", "message"),
        [
            (
                np.zeros((20, 12), np.float32),
                r"not tied: lm_head.weight is \[20, 12\] and .* is \[19, 12\].*",
            ),
            (np.zeros((19, 12), np.int8), "unsupported type: lm_head.weight is I8, not one of .*"),
        ],
    )
    def test_tied_and_what_cannot_be_the_embedding(self, tmp_path, head, message):
        tensors = random_tensors(target_shapes(TIED)) | {"lm_head.weight": head}
        folder = write(tmp_path / "tied", TIED, tensors)
        for look in (load_target, describe):
            with pytest.raises(ValueError, match=f"does not hold the tensors of its config:\n  {message}$"):
                look(folder)


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


class TestFiles:
    def unreadable(self, folder, path):
        with pytest.raises(ValueError, match="not a readable safetensors file") as info:
            load_target(folder)
        assert str(path) in str(info.value)

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
    def test_pickled(self, tmp_path, name):
        folder = write(tmp_path / "target", V4, {})
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
        with pytest.raises(ValueError, match=f"pickled weights .*'{name}'.*convert them to safetensors"):
            load_target(folder)
        assert not (tmp_path / "ran").exists()

    def test_pickled_beside_safetensors(self, folder):
        (folder / "pytorch_model.bin").write_bytes(b"junk")
        load_target(folder)

    @pytest.mark.parametrize("kept", [0, 4, 100, -1], ids="{} bytes".format)
    def test_truncated(self, folder, kept):
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:kept])
        self.unreadable(folder, path)

    @pytest.mark.parametrize(
        "start",
        [
            b"\xff" * 16,
            (10**6).to_bytes(8, "little"),  # a header that is longer than the file
            (16).to_bytes(8, "little") + b"no header at all",
            b"version https://git-lfs.github.com/spec/v1",  # what is checked out without the large files
        ],
        ids=["bytes", "header length", "header", "pointer"],
    )
    @pytest.mark.parametrize("sharded", [False, True])
    def test_corrupt(self, tmp_path, tensors, start, sharded):
        folder = write(tmp_path / "target", V4, *(halves(tensors) if sharded else [tensors]))
        path = max(folder.glob("*.safetensors"))
        path.write_bytes(start + path.read_bytes()[len(start) :])
        self.unreadable(folder, path)

    def test_a_tensor_beyond_the_end(self, folder):
        path = folder / "model.safetensors"
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        header["lm_head.weight"]["data_offsets"][1] += 4
        changed = json.dumps(header).encode()
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
        self.unreadable(folder, path)

    def test_no_weights(self, folder):
        (folder / "model.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"holds no \*.safetensors") as info:
            load_target(folder)
        assert str(folder) in str(info.value)

    def test_the_wrong_loader(self, folder, head_folder):
        with pytest.raises(ValueError, match="describes a draft head; load it with load_draft_head"):
            load_target(head_folder)
        with pytest.raises(ValueError, match="is not a draft head; load it with load_target"):
            load_draft_head(folder)

    def test_eos(self, folder, tmp_path, tensors):
        assert load_target(folder).eos_token_ids == ()
        (folder / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
        assert load_target(folder).eos_token_ids == (3, 5)
        (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
        with pytest.raises(ValueError, match=rf"^{folder}/generation_config\.json: eos_token_id must be"):
            load_target(folder)
        own = write(tmp_path / "own", {**V4, "eos_token_id": 7}, tensors)
        assert load_target(own).eos_token_ids == (7,)

    def test_the_tokenizer_s_end(self, folder):
        """Of a document or of a turn: either file may name the one that the others lack."""
        vocab_size = V4["vocab_size"]
        tokenizer = word_tokenizer(vocab_size)
        for word, expected in (("d", (5, 3)), ("f", (5,)), (None, (5,))):
            tokenizer.eos_token = word
            tokenizer.save_pretrained(folder)
            (folder / "generation_config.json").write_text('{"eos_token_id": 5}')
            assert load_target(folder).eos_token_ids == expected
        # One that was added later has no logit, and no word makes an end of unknown words.
        tokenizer.add_tokens(["<end>"], special_tokens=True)
        tokenizer.eos_token = "<end>"
        assert tokenizer.eos_token_id >= vocab_size
        assert read_eos_token_ids(folder, tokenizer, vocab_size) == (5,)
        assert read_eos_token_ids(folder, tokenizer, vocab_size + 1) == (5, vocab_size)
        tokenizer = word_tokenizer(vocab_size)
        tokenizer.unk_token, tokenizer.eos_token = "a", "nowhere"
        assert tokenizer.eos_token_id == 0
        assert read_eos_token_ids(folder, tokenizer, vocab_size) == (5,)

    def test_without_tokenizer(self, folder):
        assert load_target(folder).tokenizer is None


class TestPlaces:
    @pytest.mark.parametrize("load", [load_target, load_draft_head])
    def test_no_config(self, tmp_path, load):
        with pytest.raises(FileNotFoundError, match=f"{tmp_path} has no config.json"):
            load(tmp_path)

    def test_nowhere(self, folder):
        places = ("nowhere", "/nowhere/at/all", "https://host/owner/name", "a b/c")
        for place in (*places, folder / "model.safetensors"):
            with pytest.raises(FileNotFoundError, match=f"{place} is neither a folder nor a hub id"):
                load_target(place)

    def test_words_and_paths(self, folder):
        assert_same_weights(load_target(str(folder)).weights, load_target(folder).weights)


class TestDtype:
    @pytest.mark.parametrize(("backend", "expected"), [("cpu", "float32"), ("gpu", "bfloat16")])
    def test_auto(self, folder, head_folder, monkeypatch, backend, expected):
        monkeypatch.setattr(jax, "default_backend", lambda: backend)
        for loaded in (load_target(folder), load_draft_head(head_folder)):
            assert {x.dtype for x in jax.tree.leaves(loaded.weights)} == {jnp.dtype(expected)}

    @pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8", ""])
    def test_other_words(self, folder, fetched, dtype):
        with pytest.raises(ValueError, match=f"dtype must be .*, bfloat16 or float16, not '{dtype}'"):
            load_target(folder, dtype=dtype)
        assert not fetched


class TestFit:
    def test_is_checked_before_weights_are_read(self, tmp_path, folder):
        target = load_target(folder)
        # There are no weights, and that is not what the error is about.
        without_weights = tmp_path / "head"
        without_weights.mkdir()
        (without_weights / "config.json").write_text(json.dumps({**HEAD, "hidden_size": 16}))
        with pytest.raises(ValueError, match=r"does not fit the target: .*hidden_size is 16"):
            load_draft_head(without_weights, target=target)


class TestSave:
    @pytest.fixture
    def weights(self, folder):
        return load_target(folder, dtype="float32").weights

    def test_what_is_written(self, tmp_path, weights):
        place = tmp_path / "deep" / "down" / "target"
        extra = {"generation_config.json": '{"eos_token_id": 4}', "README.md": "naïve"}
        save_checkpoint(place, V5, weights, extra_files=extra)
        assert {path.name for path in place.iterdir()} == {"config.json", "model.safetensors", *extra}
        assert json.loads((place / "config.json").read_text()) == V5
        assert (place / "README.md").read_text(encoding="utf-8") == "naïve"
        assert [path.name for path in place.parent.iterdir()] == ["target"]
        assert {x.dtype for x in load_file(place / "model.safetensors").values()} == {BFLOAT16}
        assert load_target(place).eos_token_ids == (4,)

    def test_an_existing_folder_is_kept(self, tmp_path, weights):
        place = tmp_path / "mine"
        place.mkdir()
        (place / "notes").write_text("keep")
        with pytest.raises(FileExistsError, match="mine exists"):
            save_checkpoint(place, V4, weights)
        assert [path.name for path in place.iterdir()] == ["notes"]

    @pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
    def test_a_failure_midway_leaves_nothing(self, tmp_path, weights, monkeypatch, error):
        def half_a_file(tensors, path, metadata):
            Path(path).write_bytes(b"half")
            raise error

        monkeypatch.setattr(writing, "save_file", half_a_file)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(type(error)):
            save_checkpoint(tmp_path / "new", V4, weights)
        assert sorted(tmp_path.iterdir()) == before

    @pytest.mark.parametrize(
        "raw", [{**V4, "model_type": "llama"}, {**V4, "zoom": 1}, {**V4, "num_hidden_layers": 4}, HEAD]
    )
    def test_a_config_that_is_not_the_weights(self, tmp_path, weights, raw):
        before = sorted(tmp_path.iterdir())
        with pytest.raises((ValueError, KeyError)):
            save_checkpoint(tmp_path / "new", raw, weights)
        assert sorted(tmp_path.iterdir()) == before

    def test_weights_of_other_shapes(self, tmp_path, weights):
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match="lm_head"):
            save_checkpoint(tmp_path / "new", {**V4, "vocab_size": 20}, weights)
        assert sorted(tmp_path.iterdir()) == before


class TestStreaming:
    @pytest.mark.parametrize("num_shards", [1, 2])
    def test_the_host_holds_one_tensor_at_a_time(self, tmp_path, fetched, num_shards):
        """A dozen megabytes are loaded, yet Python and NumPy never hold more than two parameters.

        Two: one that is made, and the one before, which is sent. The type differs from the stored one, so
        that on a CPU no parameter can be the very memory that was read.
        """
        raw = {**V4, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 1024}
        tensors = random_tensors(target_shapes(raw))
        largest = max(tensor.nbytes for tensor in tensors.values())
        assert sum(tensor.nbytes for tensor in tensors.values()) > 11 * largest
        folder = write(tmp_path / "target", raw, *(halves(tensors) if num_shards == 2 else [tensors]))
        names = sorted(tensors)
        del tensors
        load_target(folder, dtype="bfloat16")  # whatever is imported or compiled once
        fetched.clear()
        tracemalloc.start()
        try:
            target = load_target(folder, dtype="bfloat16")
            jax.block_until_ready(target.weights)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert sorted(fetched) == names  # each once
        assert peak < 4 * largest
