"""Limits of a GGUF file's header: a file beyond one is refused before what it announces is read or built."""

import struct
import tracemalloc

import pytest

from jetspec_jax import CheckpointError, load_target
from jetspec_jax.checkpoint.gguf import header as header_of_files
from jetspec_jax.checkpoint.gguf import tensors as tensors_of_files
from jetspec_jax.checkpoint.gguf import tokenizer as tokenizers_of_files
from jetspec_jax.checkpoint.gguf.header import read_header
from jetspec_jax.checkpoint.gguf.tensors import GgufTensors
from jetspec_jax.checkpoint.gguf.tokenizer import read_tokenizer
from jetspec_jax.checkpoint.gguf.vocabulary import read_vocabulary
from tests.loading.gguf_files import CONFIGS, metadata_of, random_tensors, write_gguf
from tests.loading.test_gguf_tokenizer import CONTROL, NORMAL, byte_level, sentence_piece

PLAIN = {**CONFIGS["llama"], "rope_scaling": None}
BYTE, STRING, ARRAY, FLOAT = 1, 8, 9, 6
# What a refusal may allocate: a file of 1 GiB announces far more.
FEW_BYTES = 2**20


def packed(text):
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def array(kind, count):
    return struct.pack("<IIQ", ARRAY, kind, count)


def value(text):
    return struct.pack("<I", STRING) + packed(text)


def write_header(path, metadata, tensors=b"", *, num_tensors=0, num_values=None, size=None):
    """Writes a file of encoded metadata and tensors; ``size`` adds zeros that take no room on a disk."""
    body = b"".join(packed(key) + content for key, content in metadata.items())
    count = len(metadata) if num_values is None else num_values
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, num_tensors, count) + body + tensors)
        if size is not None:
            file.truncate(size)
    return path


def refused(read, path, complaint):
    """Reading is refused with a short message, and without large objects."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=rf"(?s)x\.gguf.*{complaint}") as info:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES
    finally:
        tracemalloc.stop()
    assert len(str(info.value)) < 2000


class TestMetadata:
    @pytest.mark.parametrize(
        ("key", "content", "complaint"),
        [
            ("x.y", array(BYTE, 2**30 - 200), "'x.y' has 1,073,741,624 elements, and may have 4,096"),
            ("x.y", array(STRING, 4097), "'x.y' has 4,097 elements"),
            ("tokenizer.other", array(BYTE, 4097), "'tokenizer.other' has 4,097 elements"),
            ("tokenizer.ggml.tokens", array(STRING, 2**26), "67,108,864 elements, and may have 1,048,576"),
            ("x.y", struct.pack("<IQ", STRING, 2**30 - 200), "1,073,741,624 bytes follow after 'x.y'"),
            ("tokenizer.chat_template", struct.pack("<IQ", STRING, 2**25), "'tokenizer.chat_template'"),
            ("tokenizer.ggml.tokens", array(STRING, 1) + struct.pack("<Q", 2**25), "'tokenizer.ggml.tokens'"),
        ],
    )
    def test_too_large(self, tmp_path, key, content, complaint):
        refused(read_header, write_header(tmp_path / "x.gguf", {key: content}, size=2**30), complaint)

    def test_a_key(self, tmp_path):
        path = write_header(tmp_path / "x.gguf", {}, struct.pack("<Q", 2**30 - 200), num_values=1, size=2**30)
        refused(read_header, path, "1,073,741,624 bytes follow")

    def test_all_together(self, tmp_path, monkeypatch):
        """Each value is small enough; the limit is lower here, so that reading up to it is small too."""
        monkeypatch.setattr(header_of_files, "MAX_HEADER_BYTES", 2**14)
        values = {f"general.{number}": value("a" * 1000) for number in range(20)}
        refused(read_header, write_header(tmp_path / "x.gguf", values), "header is too large")
        fewer = dict(list(values.items())[:10])
        assert len(read_header(write_header(tmp_path / "x.gguf", fewer)).metadata) == 10

    def test_as_large_as_may_be(self, tmp_path):
        metadata = {
            "x.numbers": array(BYTE, 4096) + b"\xff" * 4096,
            "x.text": value("é" * 2**20),
            "tokenizer.ggml.tokens": array(STRING, 2) + packed("a" * 2**23) + packed("b" * 2**22),
            "tokenizer.ggml.token_type": array(BYTE, 2**20) + bytes(2**20),
            "tokenizer.huggingface.json": value("{}" * 2**22),
        }
        found = read_header(write_header(tmp_path / "x.gguf", metadata)).metadata
        assert found["x.numbers"] == [-1] * 4096
        assert found["x.text"] == "é" * 2**20
        assert [len(token) for token in found["tokenizer.ggml.tokens"]] == [2**23, 2**22]
        assert found["tokenizer.ggml.token_type"].tolist() == [0] * 2**20
        assert found["tokenizer.huggingface.json"] is None  # it repeats the tokenizer, and is not read

    @pytest.mark.parametrize(("tensors", "values"), [(2**14 + 1, 1), (0, 4097), (2**64 - 1, 2**64 - 1)])
    def test_counts(self, tmp_path, tensors, values):
        path = write_header(tmp_path / "x.gguf", {}, num_tensors=tensors, num_values=values, size=2**30)
        refused(read_header, path, "tensors and .* metadata keys, and may have 16,384 and 4,096")

    def test_names_of_tensors(self, tmp_path):
        for length, complaint in ((2**30 - 100, "bytes follow"), (65, "has a name of 65 characters, above")):
            path = write_header(
                tmp_path / "x.gguf",
                {"general.type": value("model")},
                struct.pack("<Q", length) + b"a" * 65,
                num_tensors=1,
                size=2**30,
            )
            refused(read_header, path, complaint)


class TestVocabulary:
    def write(self, tmp_path, metadata, rows=None):
        raw = {**PLAIN, "vocab_size": rows or len(metadata["ggml.tokens"])}
        given = {f"tokenizer.{key}": content for key, content in metadata.items()}
        return write_gguf(tmp_path / "x.gguf", raw, random_tensors(raw), metadata=given)

    @pytest.mark.parametrize("make", [byte_level, lambda: sentence_piece(0)])
    @pytest.mark.parametrize("token", ["a" * 200_000, "a" * 16_385, "é" * 8192 + "a"], ids=len)
    def test_a_long_token(self, tmp_path, monkeypatch, make, token):
        """Finding merges takes the square of the length, so that it must not begin."""
        monkeypatch.setattr("transformers.tokenization_utils_base.generate_merges", None)
        metadata = make()
        metadata["ggml.tokens"][-1] = token
        path = self.write(tmp_path, metadata)
        with pytest.raises(CheckpointError, match=r"token [0-9]+ has [0-9,]+ bytes; a token may have 16,384"):
            load_target(path)

    def test_the_longest_token(self, tmp_path):
        metadata = byte_level()
        metadata["ggml.tokens"].append("é" * 8192)
        metadata["ggml.token_type"].append(NORMAL)
        header = read_header(self.write(tmp_path, metadata))
        assert len(read_tokenizer(header)) == len(metadata["ggml.tokens"])

    def test_many_long_tokens(self, tmp_path, monkeypatch):
        monkeypatch.setattr("transformers.tokenization_utils_base.generate_merges", None)
        metadata = sentence_piece(0)
        metadata["ggml.tokens"] += [f"{number:02}" + "a" * 16_000 for number in range(5)]
        metadata["ggml.scores"] += [0.0] * 5
        metadata["ggml.token_type"] += [NORMAL] * 5
        path = self.write(tmp_path, metadata)
        with pytest.raises(CheckpointError, match=r"too many long tokens: .* the most is 1,073,741,824"):
            load_target(path)

    def test_many_added_tokens(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tokenizers_of_files, "MAX_ADDED", 1000)
        metadata = byte_level()
        for size, fits in ((900, True), (1000, False)):
            more = metadata | {
                "ggml.tokens": [*metadata["ggml.tokens"], "x" * size],
                "ggml.token_type": [*metadata["ggml.token_type"], CONTROL],
            }
            header = read_header(self.write(tmp_path, more))
            if fits:
                assert len(read_tokenizer(header)) == len(more["ggml.tokens"])
                continue
            with pytest.raises(ValueError, match=r"1,014 characters in control .* the most are 1,000"):
                read_tokenizer(header)

    @pytest.mark.parametrize("surplus", [0, 1])
    def test_more_tokens_than_rows(self, tmp_path, surplus):
        metadata = byte_level()
        count = len(metadata["ggml.tokens"])
        path = self.write(tmp_path, metadata, count - surplus)
        if not surplus:
            assert len(load_target(path, dtype="float32").tokenizer) == count
            return
        with pytest.raises(CheckpointError, match=f"has {count} tokens, more than the {count - 1} rows"):
            load_target(path)

    def test_without_an_embedding(self, tmp_path):
        metadata = {"tokenizer.ggml.tokens": array(STRING, 1) + packed("a")}
        header = read_header(write_header(tmp_path / "x.gguf", metadata))
        assert read_vocabulary(header).tokens == ["a"]


def tensor(name, shape, start, kind=0):
    """A tensor of a file's list, of float32."""
    axes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
    return packed(name) + axes + struct.pack("<IQ", kind, start)


def write_places(path, *places, alignment=None, size=4096):
    """A file of tensors by name, number of values, and offset from byte 1024."""
    metadata = {} if alignment is None else {"general.alignment": struct.pack("<II", 4, alignment)}
    listed = b"".join(tensor(name, (count,), start) for name, count, start in places)
    keys = sum(len(packed(key) + content) for key, content in metadata.items())
    gap = 1024 - 24 - keys - len(listed) - len(packed("x") + value(""))
    return write_header(path, metadata | {"x": value("." * gap)}, listed, num_tensors=len(places), size=size)


class TestPlaces:
    @pytest.mark.parametrize(
        ("places", "complaint"),
        [
            ([("a", 8, 0), ("b", 8, 0)], "b begins at byte 1024, before a ends at byte 1056"),
            ([("a", 9, 0), ("b", 8, 32)], "b begins at byte 1056, before a ends at byte 1060"),
            # By their bytes, not as they are listed.
            ([("b", 8, 32), ("a", 9, 0)], "b begins at byte 1056, before a ends at byte 1060"),
            # Not only by the last before it.
            ([("a", 64, 0), ("b", 8, 32), ("c", 8, 128)], "b begins .* c begins at .*, before a ends at"),
            ([("a", 8, 4)], "a begins at byte 1028, which is no multiple of 32"),
        ],
    )
    def test_refused(self, tmp_path, places, complaint):
        path = write_places(tmp_path / "x.gguf", *places)
        refused(read_header, path, f"tensors are misaligned or overlap:.*{complaint}")

    def test_right_ones(self, tmp_path):
        places = [("c", 8, 64), ("a", 8, 0), ("d", 2, 128), ("b", 8, 32)]
        header = read_header(write_places(tmp_path / "x.gguf", *places))
        assert [header.tensors[name].start - header.tensors["a"].start for name in "abcd"] == [0, 32, 64, 128]
        read_header(write_places(tmp_path / "x.gguf", ("a", 1, 0), ("b", 1, 4), alignment=4))
        path = write_places(tmp_path / "x.gguf", ("a", 8, 0), ("b", 8, 32), alignment=64)
        refused(read_header, path, "b begins at byte 1056, which is no multiple of 64")

    def test_all_at_one_place(self, tmp_path):
        path = write_gguf(tmp_path / "x.gguf", PLAIN, random_tensors(PLAIN))
        content, names = path.read_bytes(), list(read_header(path).tensors)
        for name in names:
            at = content.index(packed(name)) + len(packed(name))
            at += 4 + 8 * content[at] + 4
            content = content[:at] + bytes(8) + content[at + 8 :]
        path.write_bytes(content)
        refused(read_header, path, f"overlap:.*before .* ends at byte .*and {len(names) - 1 - 8} more")
        with pytest.raises(CheckpointError, match="tensors are misaligned or overlap"):
            load_target(path)

    @pytest.mark.parametrize("alignment", [0, 3, 48])
    def test_alignments(self, tmp_path, alignment):
        path = write_places(tmp_path / "x.gguf", ("a", 8, 0), alignment=alignment)
        refused(read_header, path, f"general.alignment must be a power of two, not {alignment}")


class TestShapes:
    """Nothing is built from a shape that the config does not confirm; the files take no room."""

    def write(self, path, name, shape, raw):
        """A file whose only tensors are an embedding and another."""
        architecture = {"llama": "llama", "qwen3_moe": "qwen3moe"}[raw["model_type"]]
        integers = {
            key: struct.pack("<II", 4, number)
            for key, number in metadata_of(raw, architecture).items()
            if isinstance(number, int)
        }
        floats = {f"{architecture}.attention.layer_norm_rms_epsilon": struct.pack("<If", FLOAT, 1e-5)}
        metadata = {"general.architecture": value(architecture), **integers, **floats}
        embedding = (raw["vocab_size"], raw["hidden_size"])
        listed = tensor("token_embd.weight", embedding, 0) + tensor(name, shape, 2**20)
        return write_header(path, metadata, listed, num_tensors=2, size=2**31)

    @pytest.mark.parametrize("part", ["attn_q", "attn_k"])
    def test_rows_of_queries_and_keys(self, tmp_path, part):
        path = self.write(tmp_path / "x.gguf", f"blk.0.{part}.weight", (2**28, 1), PLAIN)
        tracemalloc.start()
        file = GgufTensors.open(path)
        assert tracemalloc.get_traced_memory()[1] < FEW_BYTES
        tracemalloc.stop()
        assert (2**28, 1) in [stored.shape for stored in file.stored.values()]
        with pytest.raises(
            CheckpointError, match=rf"misshapen: .*{part[-1]}_proj.weight is \[268435456, 1\]"
        ):
            load_target(path)

    def test_experts(self, tmp_path):
        path = self.write(tmp_path / "x.gguf", "blk.0.ffn_up_exps.weight", (2**28, 1, 1), CONFIGS["qwen3moe"])
        refused(GgufTensors.open, path, "ffn_up_exps.weight has expert 268,435,456 of at most 131,072")

    def test_experts_of_all_layers(self, tmp_path, monkeypatch):
        monkeypatch.setattr(tensors_of_files, "MAX_EXPERT_MATRICES", 23)
        raw = CONFIGS["qwen3moe"]
        path = write_gguf(tmp_path / "x.gguf", raw, random_tensors(raw))
        refused(GgufTensors.open, path, "has expert 24 of at most 23")
        monkeypatch.setattr(tensors_of_files, "MAX_EXPERT_MATRICES", 24)
        GgufTensors.open(path)
