"""GGUF to a Hugging Face folder, which is the same target without the file."""

import json

import jax
import numpy as np
import pytest

from convert.command import main
from convert.conversion import to_huggingface, to_orbax
from convert.verification import verify
from jetspec_jax import CheckpointError, load_target
from jetspec_jax.config import parse_model_config
from tests.loading.gguf_files import CONFIGS, Kind, random_tensors, write_gguf
from tests.loading.test_gguf_tokenizer import byte_level

RAW = {**CONFIGS["llama"], "vocab_size": 300}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    tokens = byte_level()
    tokens["ggml.tokens"] += ["<|im_end|>", "<|endoftext|>"]  # ends that the metadata do not name
    tokens["ggml.token_type"] += [1, 3]
    metadata = {f"tokenizer.{key}": value for key, value in tokens.items()}
    place = tmp_path_factory.mktemp("gguf") / "x.gguf"
    return write_gguf(place, RAW, random_tensors(RAW), kind=Kind.Q8_0, metadata=metadata)


def test_the_same_target(path, tmp_path):
    done = to_huggingface(path, tmp_path / "folder")
    assert (done.kind, done.layout) == ("target", "huggingface")
    ours, theirs = load_target(path, dtype="float32"), load_target(tmp_path / "folder", dtype="float32")
    assert theirs.config == ours.config == parse_model_config(RAW)
    ends = [0, *(ours.tokenizer.convert_tokens_to_ids(word) for word in ("<|im_end|>", "<|endoftext|>"))]
    assert theirs.eos_token_ids == ours.eos_token_ids == tuple(ends)
    jax.tree.map(np.testing.assert_array_equal, ours.weights, theirs.weights)
    chat, text = [{"role": "user", "content": "ab"}], "abc<|end|> 12\n  3's<|im_end|>"
    assert theirs.tokenizer.encode(text) == ours.tokenizer.encode(text)
    for tokenizer in (ours.tokenizer, theirs.tokenizer):
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab<|end|>"
    # What other readers look for.
    raw = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLM"]
    generation = json.loads((tmp_path / "folder" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == raw["eos_token_id"] == ends


@pytest.mark.wide
def test_it_is_verified(path, tmp_path, capsys):
    assert main([str(path), str(tmp_path / "folder"), "--dtype", "bfloat16", "--verify"]) == 0
    assert "verify: passed" in capsys.readouterr().out
    (tmp_path / "folder" / "generation_config.json").write_text('{"eos_token_id": [1]}')
    found = verify(path, tmp_path / "folder", dtype="bfloat16")
    assert found.differing_files == ("generation_config.json",)


def test_refused(path, tmp_path):
    with pytest.raises(CheckpointError, match=r"x\.gguf is a GGUF file, not a Hugging Face folder"):
        to_orbax(path, tmp_path / "folder")
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"cut\.gguf: it is cut off"):
        to_huggingface(tmp_path / "cut.gguf", tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
