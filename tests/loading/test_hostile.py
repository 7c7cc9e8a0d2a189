"""Files that nobody should trust: each ends in one CheckpointError that names the file, at once."""

import contextlib
import json
import os
import re
import shutil
import struct
import tracemalloc
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jetspec_jax import CheckpointError, load_draft_head, load_target
from jetspec_jax.checkpoint import CheckpointError as OfTheRoom
from jetspec_jax.checkpoint.finite import is_finite
from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.checkpoint.writing import save_checkpoint
from jetspec_jax.config.fields import CONFIG, LARGE, check_values
from jetspec_jax.config.fields import INDEX as OF_INDEX
from jetspec_jax.inspect.describe import describe
from tests.decode.tiny import word_tokenizer
from tests.loading import test_gemma4 as gemma4
from tests.loading import test_qwen3_moe as moe
from tests.loading import test_step as step
from tests.loading.published import HEAD, V4, halves, head_shapes, random_tensors, write, write_index

INDEX = "model.safetensors.index.json"
CONFIGS_OF_TOKENIZERS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("processor_config.json", "preprocessor_config.json", "chat_template.json"),
)
DEEP = "[" * 100_000


def refused(folder, message, file="", load=load_target):
    """Loading is refused, and the message names a file of the folder."""
    with pytest.raises(CheckpointError, match=message) as info:
        load(folder)
    assert str(folder / file) in str(info.value)
    assert len(str(info.value)) < 2000
    return info.value


def test_the_exception():
    assert CheckpointError is OfTheRoom
    assert issubclass(CheckpointError, ValueError)


class TestJson:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (DEEP, "nested too deeply"),
            ("\xff", "is not valid JSON"),
            (
                '{"model_type": "qwen3", "model_type": "gemma3"}',
                "key 'model_type' occurs twice with different values",
            ),
            ('{"a": ' + "9" * 5000 + "}", "is not valid JSON"),
            ("null", "must hold a JSON object"),
        ],
        ids=["deep", "bytes", "twice", "digits", "null"],
    )
    @pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json"])
    def test_text(self, folder, name, text, message):
        (folder / name).write_bytes(text.encode("latin-1"))
        refused(folder, message, name)

    @pytest.mark.parametrize("kind", ["folder", "pipe"])
    @pytest.mark.parametrize("name", ["config.json", INDEX, "generation_config.json", "tokenizer.json"])
    def test_no_file(self, folder, name, kind):
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir() if kind == "folder" else os.mkfifo(folder / name)
        refused(folder, "is a folder" if kind == "folder" else "no regular file", name)

    @pytest.mark.parametrize(
        ("name", "bound", "says"),
        [
            ("config.json", CONFIG, r"4,194,305 bytes; it may have 4,194,304 \(4 MiB\)"),
            ("generation_config.json", CONFIG, r"4,194,305 bytes; it may have 4,194,304 \(4 MiB\)"),
            (INDEX, OF_INDEX, r"33,554,433 bytes; it may have 33,554,432 \(32 MiB\)"),
        ],
    )
    def test_too_large(self, folder, name, bound, says):
        """A file of zeros that takes no room on the disk: it is refused before it is read."""
        with (folder / name).open("ab") as file:
            file.truncate(bound.bytes + 1)
        refused(folder, f"has {says}, more than any published file$", name)

    @pytest.mark.parametrize("unit", ["[],", '{"":0},', '"ab",', '["",""],', "1,"])
    @pytest.mark.parametrize(
        ("name", "load"),
        [
            *((name, load_target) for name in ("config.json", INDEX, "generation_config.json")),
            *((name, load_tokenizer) for name in CONFIGS_OF_TOKENIZERS),
            *((name, load_tokenizer) for name in ("tokenizer.json", "vocab.json")),
        ],
    )
    def test_too_many_values(self, folder, name, load, unit, monkeypatch):
        """Small values, which parsers turn into twenty times their bytes and more, are counted before."""
        word_tokenizer(19).save_pretrained(folder)
        bound = CONFIG if "config" in name or name in CONFIGS_OF_TOKENIZERS else LARGE
        size = 5 * bound.values if "index" not in name else 5 * OF_INDEX.values
        (folder / name).write_text(f'{{"x": [{unit * (size // len(unit))}0]}}')
        read_bytes = Path.read_bytes
        monkeypatch.setattr(Path, "read_bytes", lambda path: read_bytes(path) if path.name != name else 1 / 0)
        tracemalloc.start()
        try:
            refused(folder, r"has more than [\d,]+ values in its [\d,]+ bytes", name, load)
            assert tracemalloc.get_traced_memory()[1] < 16 * 2**20
        finally:
            tracemalloc.stop()

    def test_what_is_as_large_as_published(self, folder):
        """Tokenizers of 262,144 tokens and twice as many merges pass, and so do configs with many labels."""
        merges = b'["ab","cd"],' * (LARGE.values // 3 - 1)
        check_values([merges], len(merges), LARGE, "it")
        with pytest.raises(ValueError, match="it has more than 4,194,304 values in its 16,777,200 bytes"):
            check_values([merges, b"[" * 7], len(merges), LARGE, "it")
        raw = {**V4, "id2label": {str(i): f"label {i}" for i in range(2**16)}}
        (folder / "config.json").write_text(json.dumps(raw))
        load_target(folder)

    @pytest.mark.parametrize("name", ["vocab.txt", "merges.txt", "tokenizer.model"])
    def test_too_many_lines(self, folder, name):
        word_tokenizer(19).save_pretrained(folder)
        (folder / name).write_bytes(b"a\n" * 2**21)
        refused(folder, "has more than 1,398,101 values in its 4,194,304 bytes", name, load_tokenizer)

    def test_too_many_values_of_a_header(self, folder):
        """It is refused before the library reads it, and before its end is looked for."""
        header = b'{"a":{"dtype":"U8","shape":[' + b"0," * 10**6 + b'0],"data_offsets":[0,0]}}'
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
        refused(folder, r"the header of .* has more than [\d,]+ values", "model.safetensors")
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", 2**62) + header)
        refused(folder, "is not a readable safetensors file", "model.safetensors")

    def test_too_many_shards(self, folder):
        write_index(folder, {f"a{i}": f"{i}/x.safetensors" for i in range(5000)})
        refused(folder, "names 5,000 shards; it may name 4,096", INDEX)

    @pytest.mark.parametrize(
        "name",
        [
            *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
            *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "processor_config.json"),
            *("chat_template.jinja", "chat_template.json", "additional_chat_templates/tools.jinja"),
        ],
    )
    def test_what_transformers_reads(self, folder, name):
        word_tokenizer(19).save_pretrained(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("ab") as file:
            file.truncate(2**40)
        refused(folder, "has 1,099,511,627,776 bytes; it may have ", name, load_tokenizer)
        (folder / name).unlink()
        os.mkfifo(folder / name)
        refused(folder, "is no regular file", name, load_tokenizer)

    def test_what_is_said_twice_alike(self, folder):
        text = (folder / "config.json").read_text()
        (folder / "config.json").write_text(text.rstrip()[:-1] + ', "model_type": "qwen3"}')
        load_target(folder)

    @pytest.mark.parametrize("value", [None, 5, True, ["qwen3"], {"a": 1}, "\ud800", "x" * 10**6], ids=type)
    def test_model_types(self, folder, value):
        (folder / "config.json").write_text(json.dumps({**V4, "model_type": value}))
        refused(folder, "unknown model_type", "config.json")


class TestBounds:
    @pytest.mark.parametrize(
        ("raw", "keys"),
        [
            (
                V4,
                "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
                "num_key_value_heads max_position_embeddings",
            ),
            (moe.OLDER, "num_experts num_experts_per_tok moe_intermediate_size"),
            (gemma4.PUBLISHED, "global_head_dim num_global_key_value_heads sliding_window"),
            (step.HUB_TEXT, "num_nextn_predict_layers num_attention_groups moe_num_experts share_expert_dim"),
            (HEAD, "block_size num_target_layers num_hidden_layers"),
        ],
        ids=["qwen3", "qwen3_moe", "gemma4", "step", "head"],
    )
    @pytest.mark.parametrize("value", [10**10, 10**400])
    def test_numbers(self, tmp_path, raw, keys, value):
        folder = write(tmp_path / "it", raw, {})
        for key in keys.split():
            (folder / "config.json").write_text(json.dumps({**raw, key: value}))
            for look in (load_draft_head if raw is HEAD else load_target, describe):
                refused(folder, f"{key} must be at most [0-9]+, not (1000|<integer)", "config.json", look)

    @pytest.mark.parametrize(
        "text", ["1e999", "-1e999", "NaN", "Infinity", "1e39", "1e-320", "1" + "0" * 400]
    )
    @pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
    def test_no_number_of_float32(self, folder, key, text):
        raw = json.dumps({**V4, key: "HERE"}).replace('"HERE"', text)
        (folder / "config.json").write_text(raw)
        refused(folder, f"{key} must be a positive number", "config.json")

    @pytest.mark.wide
    def test_the_most_layers(self, folder):
        (folder / "config.json").write_text(json.dumps({**V4, "num_hidden_layers": 512}))
        refused(folder, "missing: model.layers.")


class TestShards:
    @pytest.fixture
    def sharded(self, tmp_path, tensors):
        return write(tmp_path / "sharded", V4, *halves(tensors))

    @pytest.mark.parametrize(
        "name",
        [
            *("../outside/model.safetensors", "/etc/passwd", "a/../../outside/model.safetensors", ".."),
            *(
                "C:\\model.safetensors",
                "..\\outside\\model.safetensors",
                "linked/model.safetensors",
                "",
                "a\0/b",
            ),
        ],
    )
    def test_outside_the_folder(self, tmp_path, sharded, tensors, name):
        outside = tmp_path / "outside"
        outside.mkdir()
        save_file(tensors, outside / "model.safetensors")
        (sharded / "linked").symlink_to(outside)
        write_index(sharded, dict.fromkeys(tensors, name))
        error = refused(sharded, "names shards outside the checkpoint's folder", INDEX)
        assert repr(name) in str(error)

    @pytest.mark.parametrize("name", ["\0", "\ud800", "a" * 300, "a" * 5000 + "/b", "nowhere"], ids=len)
    def test_no_file(self, sharded, tensors, name):
        write_index(sharded, dict.fromkeys(tensors, name))
        refused(sharded, "index names shards that are not there", INDEX)

    def test_of_the_hubs_cache(self, tmp_path, sharded, tensors):
        cache = tmp_path / "models--owner--model"
        snapshot, blobs = cache / "snapshots" / ("0" * 40), cache / "blobs"
        snapshot.mkdir(parents=True)
        blobs.mkdir()
        for number, file in enumerate(sorted(sharded.iterdir())):
            shutil.copy(file, blobs / f"{number:064}")
            (snapshot / file.name).symlink_to(f"../../blobs/{number:064}")
        loaded = load_target(snapshot, dtype="float32")
        np.testing.assert_array_equal(loaded.weights["lm_head"], tensors["lm_head.weight"])
        link = tmp_path / "link"
        link.symlink_to(snapshot)
        load_target(link)

    def test_a_folder_of_that_name(self, folder):
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors").mkdir()
        refused(folder, "is a folder", "model.safetensors")


class TestNonfinite:
    @pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
    @pytest.mark.parametrize(
        "dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=lambda own: own.__name__
    )
    def test_is_refused_by_name(self, tmp_path, tensors, dtype, value):
        tensors = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
        name = "model.layers.1.self_attn.k_proj.weight"
        tensors[name][-1, -1] = value
        first, second = halves(tensors)
        folder = write(tmp_path / "it", V4, first, second)
        file = f"model-0000{1 if name in first else 2}-of-00002.safetensors"
        refused(folder, f"{re.escape(name)} holds values that are not finite", file)
        loaded = load_target(folder, dtype="float32", allow_nonfinite=True)
        assert not np.isfinite(np.asarray(loaded.weights["layers"][1]["self_attn"]["qkv_proj"])).all()

    def test_in_a_head(self, tmp_path):
        tensors = random_tensors(head_shapes(HEAD))
        tensors["norm.weight"][0] = np.nan
        folder = write(tmp_path / "head", HEAD, tensors)
        refused(folder, "norm.weight holds values that are not finite", "model.safetensors", load_draft_head)
        load_draft_head(folder, allow_nonfinite=True)

    def test_in_the_type_that_is_read(self, folder):
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = 3.4e38
        save_file(tensors, folder / "model.safetensors")
        load_target(folder, dtype="float32")
        with pytest.raises(CheckpointError, match=r"layers.0.mlp.up_proj.weight .* not finite in bfloat16"):
            load_target(folder, dtype="bfloat16")

    @pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "float8_e5m2", "float8_e4m3fn"])
    @pytest.mark.parametrize("size", [1, 7, 2**17 + 1])
    def test_what_is_finite(self, kind, size):
        dtype = np.dtype(getattr(ml_dtypes, kind, kind))
        largest = ml_dtypes.finfo(dtype).max
        for sign in (1, -1):
            values = np.full(size, sign * largest, dtype)
            values[: size // 2] = dtype.type(-0.0)
            assert is_finite(values)
            for bad in (np.nan, np.inf):
                spoiled = values.copy()
                spoiled[-1] = sign * np.array(bad, np.float32).astype(dtype)
                assert not is_finite(spoiled)
        assert is_finite(np.zeros((3, 0), dtype))


class TestTokenizer:
    @pytest.fixture
    def with_tokenizer(self, folder):
        word_tokenizer(19).save_pretrained(folder)
        assert load_target(folder).tokenizer is not None
        return folder

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize(
        "content", [b"", b"\xff" * 10, b"[]", b'{"a": 1', b"null", DEEP.encode()], ids=len
    )
    def test_garbage(self, with_tokenizer, name, content):
        (with_tokenizer / name).write_bytes(content)
        refused(with_tokenizer, "tokenizer")

    @pytest.mark.parametrize(
        "change", [{"model": {}}, {"decoder": 5}, {"added_tokens": [{"id": -1}]}], ids=str
    )
    def test_parts(self, with_tokenizer, change):
        path = with_tokenizer / "tokenizer.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
        refused(with_tokenizer, "the tokenizer's files cannot be read")

    def test_code_of_the_folder_is_not_run(self, with_tokenizer, tmp_path):
        (with_tokenizer / "tool.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Tool: pass\n")
        path = with_tokenizer / "tokenizer_config.json"
        settings = {"tokenizer_class": "Tool", "auto_map": {"AutoTokenizer": ["tool.Tool", "tool.Tool"]}}
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
        with contextlib.suppress(CheckpointError):
            load_target(with_tokenizer)
        assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("no_type_checks")
class TestArguments:
    @pytest.mark.parametrize("load", [load_target, load_draft_head])
    @pytest.mark.parametrize("place", [5, None, 1.5, b"x", ["a"], object()], ids=type)
    def test_places_of_other_types(self, load, place):
        with pytest.raises(TypeError, match="a checkpoint must be a folder, a GGUF file or a hub id"):
            load(place)

    @pytest.mark.parametrize(
        "place", ["", "a" * 5000, "a" * 300 + "/b", "\0", "~nobody-has-this-name", "a\nb"]
    )
    def test_places_that_cannot_be(self, place):
        with pytest.raises(FileNotFoundError):
            load_target(place)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"dtype": 5}, "dtype must be a string"),
            ({"ignore_config_keys": "zoom"}, "ignore_config_keys must be a list of strings"),
            ({"allow_nonfinite": "no"}, "allow_nonfinite must be True or False"),
        ],
        ids=str,
    )
    def test_settings_of_other_types(self, folder, settings, message):
        for load in (load_target, load_draft_head):
            with pytest.raises(TypeError, match=message):
                load(folder, **settings)

    def test_a_head_for_no_target(self, folder):
        with pytest.raises(TypeError, match=r"expected a Target, .* not str"):
            load_draft_head(folder, target="demo")

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"weights": {"embed_tokens": 5}}, "not those of the config"),
            ({"dtype": "int8"}, "is int8; supported types to store"),
            ({"extra_files": {"../x": ""}}, r"outside the folder: \['\.\./x'\]"),
        ],
        ids=str,
    )
    def test_saving(self, tmp_path, folder, settings, message):
        given = {"raw_config": V4, "weights": load_target(folder).weights, **settings}
        before = sorted(tmp_path.iterdir())
        with pytest.raises(ValueError, match=message):
            save_checkpoint(tmp_path / "new", **given)
        assert sorted(tmp_path.iterdir()) == before
