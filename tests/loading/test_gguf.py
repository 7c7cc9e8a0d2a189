"""GGUF: config and tensors of each architecture are those of the folder that the file was made of."""

import contextlib
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import CheckpointError, load_draft_head, load_target
from jetspec_jax.checkpoint.gguf.config import read_config
from jetspec_jax.checkpoint.gguf.header import Header, TensorInfo, read_header
from jetspec_jax.checkpoint.gguf.tensors import GgufTensors
from jetspec_jax.checkpoint.parts import place
from jetspec_jax.checkpoint.reading import read_weights
from jetspec_jax.checkpoint.source import Source
from jetspec_jax.config import parse_model_config
from jetspec_jax.config.geometry import Linear
from jetspec_jax.inspect.describe import describe
from tests.loading.gguf_files import ARCHITECTURES, CONFIGS, Kind, metadata_of, random_tensors, write_gguf
from tests.loading.published import write
from tests.meshes import mesh_of

LLAMA = CONFIGS["llama"]
PLAIN = {**LLAMA, "rope_scaling": None}
FLOAT32 = jnp.dtype("float32")
#: The types that the package can write, too.
WRITABLE = [
    *(Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    *(Kind.TQ1_0, Kind.TQ2_0, Kind.MXFP4),
]
# A block of these is 256 values.
LONG_BLOCKS = (Kind.TQ1_0, Kind.TQ2_0)
LARGER = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "rope_scaling": None}


def equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.parametrize("name", CONFIGS)
def test_is_the_folder(tmp_path, name):
    raw = CONFIGS[name]
    tensors = random_tensors(raw)
    if name == "gemma3":  # numbers to which one can be added without rounding
        tensors = {own: np.round(tensor * 1024) / np.float32(1024) for own, tensor in tensors.items()}
    folder = write(tmp_path / "folder", raw, tensors)
    ours = load_target(write_gguf(tmp_path / "x.gguf", raw, tensors), dtype="float32")
    theirs = load_target(folder, dtype="float32")
    assert ours.config == theirs.config == parse_model_config(raw)
    equal(ours.weights, theirs.weights)


@pytest.mark.parametrize("kind", WRITABLE, ids=lambda kind: kind.name)
def test_every_type(tmp_path, kind):
    """Tensors are what the package itself widens, in the type that is asked for."""
    raw = {**LLAMA, **LARGER} if kind in LONG_BLOCKS else LLAMA
    tensors = random_tensors(raw)
    widened = {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind)
        if tensor.ndim > 1 and ".layers." in name
        else tensor
        for name, tensor in tensors.items()
    }
    # Rows of queries and keys change places, and a block never spans two of them.
    folder, path = write(tmp_path / "folder", raw, widened), tmp_path / "x.gguf"
    write_gguf(path, raw, tensors, kind=kind)
    config = parse_model_config(raw)
    for dtype in (FLOAT32, jnp.dtype("bfloat16")):
        equal(read_weights(path, config, dtype), read_weights(folder, config, dtype))


def test_plain_types_stay_as_they_are(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), kind=Kind.BF16)
    weights = read_weights(path, parse_model_config(LLAMA), None)
    assert weights["layers"][0]["self_attn"]["qkv_proj"].dtype == jnp.bfloat16
    assert weights["norm"]["weight"].dtype == jnp.float32


def test_rows_alone(tmp_path):
    """An index widens the rows that it names, those of queries in the order of rotary halves."""
    path = write_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), kind=Kind.Q8_0)
    file = GgufTensors.open(path)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        tensor = file.tensor(name)
        whole = np.asarray(tensor)
        for rows, columns in (
            (slice(3, 40), slice(5, 9)),
            (slice(0, 1), slice(0, 64)),
            (slice(17, 18), slice(1)),
        ):
            np.testing.assert_array_equal(tensor[rows, columns], whole[rows, columns])
    tensor = file.tensor("model.norm.weight")
    np.testing.assert_array_equal(tensor[3:9], np.asarray(tensor)[3:9])


@pytest.mark.parametrize("name", ["llama_biased", "qwen3moe"])
def test_on_a_mesh(tmp_path, name):
    raw, mesh = CONFIGS[name], mesh_of(1, 4)
    config = parse_model_config(raw)
    path = write_gguf(tmp_path / "x.gguf", raw, random_tensors(raw), kind=Kind.Q8_0)
    equal(
        read_weights(path, config, FLOAT32, mesh),
        place(read_weights(path, config, FLOAT32), config, mesh),
    )


def described(metadata, raw=LLAMA):
    """The config of other metadata, in a file of which nothing but the embedding's shape is read."""
    name = ARCHITECTURES[raw["model_type"]]
    given = {"general.architecture": name, **metadata_of(raw, name), **metadata}
    given = {key: value for key, value in given.items() if value is not None}
    embedding = TensorInfo((raw["vocab_size"], raw["hidden_size"]), Kind.F32, 0, 0)
    tensors = {"token_embd.weight": embedding}
    if not raw["tie_word_embeddings"]:
        tensors["output.weight"] = embedding
    return parse_model_config(read_config(Header(Path("x.gguf"), given, tensors, np.zeros(0, np.uint8))))


class TestConfig:
    def test_what_may_be_left_out(self):
        raw = {**LLAMA, "head_dim": 16, "rope_scaling": None, "num_key_value_heads": 4, "rope_theta": 1e4}
        left_out = ("attention.key_length", "attention.value_length", "rope.dimension_count")
        left_out += ("attention.head_count_kv", "rope.freq_base", "vocab_size")
        metadata = {f"llama.{key}": None for key in left_out}
        assert described(metadata, raw) == parse_model_config(raw)

    def test_numbers_are_decimal(self):
        """1e-5 in float32 is another number in float64, which no config.json would have."""
        assert described({}, PLAIN).rms_norm_eps == 1e-5

    @pytest.mark.parametrize("key", ["rope.scaling.factor", "rope.scale_linear"])
    def test_linear(self, key):
        kind = {"llama.rope.scaling.type": "linear"} if key != "rope.scale_linear" else {}
        layer = described({**kind, f"llama.{key}": 2.0}, PLAIN).layers[0]
        assert layer.rope.scaling == Linear(2.0)

    def test_yarn(self):
        scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
        raw = {**CONFIGS["qwen3"], "rope_scaling": None}
        metadata = {
            "qwen3.rope.scaling.type": "yarn",
            "qwen3.rope.scaling.factor": 4.0,
            "qwen3.rope.scaling.original_context_length": 64,
        }
        assert described(metadata, raw) == parse_model_config({**raw, "rope_scaling": scaling})

    def test_gemma_27b(self):
        raw = {**CONFIGS["gemma3"], "num_hidden_layers": 62, "query_pre_attn_scalar": 16}
        assert described({}, raw) == parse_model_config(raw)


@pytest.mark.parametrize("count", [0, 1])
def test_a_joined_file(tmp_path, count):
    """llama-gguf-split --merge keeps the keys of a part, with the count 0."""
    tensors = random_tensors(PLAIN)
    keys = {"split.no": 0, "split.tensors.count": len(tensors), "split.count": count}
    path = write_gguf(tmp_path / "x.gguf", PLAIN, tensors, metadata=keys)
    equal(
        read_weights(path, parse_model_config(PLAIN), FLOAT32),
        load_target(write(tmp_path / "folder", PLAIN, tensors), dtype="float32").weights,
    )


def test_it_is_described(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), kind=Kind.Q8_0)
    report = describe(path)
    assert report["kind"] == "target"
    assert report["model_type"] == "llama"
    assert report["path"] == str(path)
    assert report["file_bytes"] == path.stat().st_size
    assert not report["unused_tensors"]


def broken(**changes):
    """Metadata of a Llama with other values."""
    return {f"llama.{key.replace('__', '.')}": value for key, value in changes.items()}


STRAY = np.zeros((2, 2), np.float32)


class TestRefused:
    @pytest.mark.parametrize(
        ("metadata", "extra", "complaint"),
        [
            ({"general.type": "adapter"}, {}, "it is a LoRA adapter"),
            ({"general.type": "mmproj"}, {}, "it is the projector of a multimodal model"),
            ({"split.count": 2}, {}, "it is one of 2 files .* llama-gguf-split --merge"),
            (broken(expert_count=8), {}, "expert_count=8 changes the model .*Mixtral"),
            (broken(logit_scale=2.0), {}, r"llama: unknown keys \['logit_scale'\]"),
            (broken(attention__causal=False), {}, "attention.causal=False changes"),
            (broken(rope__dimension_count=16), {}, "rope.dimension_count=16 changes"),
            (broken(rope__scaling__type="linear", rope__scaling__factor=2.0), {}, "name two scalings"),
            (broken(vocab_size=97), {}, "vocab_size=97 .*token_embd.weight has 96 rows"),
            (broken(attention__head_count_kv=1), {}, "misshapen: model.layers.0.self_attn.k_proj.weight"),
            ({}, {"blk.0.attn_sinks.weight": STRAY}, "surplus: blk.0.attn_sinks.weight"),
            ({}, {"model.norm.weight": STRAY}, r"surplus: model.norm.weight \(unknown to llama\)"),
        ],
    )
    def test_by_name(self, tmp_path, metadata, extra, complaint):
        tensors = random_tensors(LLAMA)
        path = write_gguf(tmp_path / "x.gguf", LLAMA, tensors, metadata=metadata, extra=extra)
        with pytest.raises(CheckpointError, match=f"(?s)x.gguf.*{complaint}"):
            load_target(path)

    def test_unknown_keys_may_be_vouched_for(self, tmp_path):
        metadata = broken(logit_scale=1.0)
        path = write_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA), metadata=metadata)
        config = Source(path, ignore_config_keys=["logit_scale"]).target_config
        assert config == parse_model_config(LLAMA)

    def test_an_architecture_that_is_not_ours(self, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(
            CheckpointError, match="architecture 'mamba' is not supported in GGUF; supported: llama"
        ):
            load_target(tmp_path / "x.gguf")

    def test_missing_tensors(self, tmp_path):
        tensors = random_tensors(LLAMA)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        path = write_gguf(tmp_path / "x.gguf", LLAMA, tensors)
        with pytest.raises(CheckpointError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
            load_target(path)

    def test_other_factors(self, tmp_path):
        raw = {**LLAMA, "rope_scaling": {**LLAMA["rope_scaling"], "high_freq_factor": 5.0}}
        path = write_gguf(tmp_path / "x.gguf", raw, random_tensors(raw))
        with pytest.raises(
            CheckpointError, match=r"rope_freqs.weight holds factors that are not .* factor 8.0"
        ):
            load_target(path)

    def test_integers(self, tmp_path):
        tensors = random_tensors(LLAMA)
        tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((96, 64), np.int32)
        path = write_gguf(tmp_path / "x.gguf", LLAMA, tensors)
        with pytest.raises(
            CheckpointError, match=r"unsupported type: model.layers.0.mlp.up_proj.weight is I32"
        ):
            load_target(path)

    def test_values_that_are_not_finite(self, tmp_path):
        tensors = random_tensors(LLAMA)
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = np.nan
        path = write_gguf(tmp_path / "x.gguf", LLAMA, tensors)
        with pytest.raises(CheckpointError, match=r"mlp.up_proj.weight holds values that are not finite"):
            load_target(path, dtype="float32")

    def test_a_draft_head(self, tmp_path):
        path = write_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA))
        with pytest.raises(CheckpointError, match="it is not a draft head"):
            load_draft_head(path)

    def test_no_such_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"x\.gguf: there is no such file"):
            load_target(tmp_path / "x.gguf")

    def test_a_folder_of_files(self, tmp_path):
        write_gguf(tmp_path / "x.gguf", LLAMA, random_tensors(LLAMA))
        with pytest.raises(FileNotFoundError, match=r"name one of its GGUF files: x\.gguf"):
            load_target(tmp_path)


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "x.gguf"
    metadata = {"tokenizer.ggml.tokens": ["a", "b"], "tokenizer.ggml.scores": [1.0, 2.0]}
    return write_gguf(path, LLAMA, random_tensors(LLAMA), metadata=metadata).read_bytes()


class TestDamage:
    def refused(self, tmp_path, content, complaint):
        path = tmp_path / "x.gguf"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"x.gguf.*{complaint}"):
            read_header(path)

    def test_cut_off(self, tmp_path, content):
        """In the header, at every byte of its beginning and some behind, and in the tensors."""
        for size in [*range(4, 600, 7), len(content) - 1]:
            self.refused(tmp_path, content[:size], "it is cut off")
        self.refused(tmp_path, b"", "is empty")

    def test_another_kind_of_file(self, tmp_path, content):
        self.refused(tmp_path, b"GGML" + content[4:], "it is no GGUF file")

    @pytest.mark.parametrize("version", [0, 1, 4])
    def test_another_version(self, tmp_path, content, version):
        changed = content[:4] + version.to_bytes(4, "little") + content[8:]
        self.refused(tmp_path, changed, f"it is GGUF of version {version}; supported: 2, 3")

    def test_big_endian(self, tmp_path, content):
        self.refused(tmp_path, content[:4] + (3).to_bytes(4, "big") + content[8:], "big-endian")

    @pytest.mark.parametrize("at", [8, 16])
    def test_counts(self, tmp_path, content, at):
        """More tensors or values than a file could hold end where the file does, or where a key is none."""
        changed = content[:at] + (2**60).to_bytes(8, "little") + content[at + 8 :]
        self.refused(tmp_path, changed, "")

    @pytest.mark.parametrize("key", ["tokens", "scores"])
    def test_a_long_array(self, tmp_path, content, key):
        name = f"tokenizer.ggml.{key}".encode()
        at = content.index(name) + len(name) + 8
        for count, complaint in ((2**20, "it is cut off"), (2**20 + 1, "1,048,577 elements"), (2**63, "ele")):
            changed = content[:at] + count.to_bytes(8, "little") + content[at + 8 :]
            self.refused(tmp_path, changed, complaint)

    def test_an_unknown_type(self, tmp_path, content):
        name = b"blk.0.ffn_up.weight"
        at = content.index(name) + len(name) + 4 + 2 * 8
        changed = content[:at] + (99).to_bytes(4, "little") + content[at + 4 :]
        self.refused(tmp_path, changed, "'blk.0.ffn_up.weight' is of an unknown type, number 99")

    def test_a_tensor_beyond_the_end(self, tmp_path, content):
        name = b"blk.0.ffn_up.weight"
        at = content.index(name) + len(name) + 4
        changed = content[:at] + (2**62).to_bytes(8, "little") + content[at + 8 :]
        self.refused(tmp_path, changed, "it is cut off: blk.0.ffn_up.weight ends at byte")

    def test_twice(self, tmp_path, content):
        changed = content.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight")
        self.refused(tmp_path, changed, "tensor 'blk.1.ffn_up.weight' is there twice")

    def test_text_that_is_none(self, tmp_path, content):
        self.refused(
            tmp_path, content.replace(b"general.architecture", b"general.arch\xff\xfe\xff\xffture"), ""
        )

    def test_random_bytes(self, tmp_path, content):
        """A header of other bytes is refused as a CheckpointError, or still says something."""
        rng = np.random.default_rng(0)
        header = bytearray(content[:1500])
        for number in range(200):
            changed = bytearray(header)
            for at in rng.integers(8, len(header), 4):
                changed[at] = rng.integers(256)
            path = tmp_path / "x.gguf"
            path.write_bytes(bytes(changed) + content[1500:])
            # Anything else that is raised fails the test.
            with contextlib.suppress(CheckpointError):
                config = Source(path).target_config
                assert config.vocab_size == LLAMA["vocab_size"], number
