"""Ends of generation of GGUF files: as publishers list them, by the metadata and by the tokens' texts."""

from pathlib import Path

import numpy as np
import pytest

from jetspec_jax import LLM, SamplingParams
from jetspec_jax.checkpoint.gguf.header import Header
from jetspec_jax.checkpoint.gguf.tokenizer import read_tokenizer
from jetspec_jax.checkpoint.gguf.vocabulary import special_ids
from tests.loading.gguf_files import CONFIGS, random_tensors, write_gguf
from tests.loading.test_gguf_tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, byte_level


def control(words):
    return dict.fromkeys(words.split(), CONTROL)


QWEN = control("<|endoftext|> <|im_start|> <|im_end|>")
LLAMA3 = control("<|begin_of_text|> <|end_of_text|> <|eom_id|> <|eot_id|> <|start_header_id|> <|python_tag|>")
GEMMA = control("<eos> <bos> <start_of_turn> <end_of_turn>")
MISTRAL = control("<s> </s> [INST] [/INST]") | {"<unk>": UNKNOWN}
PHI = control("<|endoftext|> <|assistant|> <|user|> <|end|> <|im_sep|>")
HARMONY = control("<|endoftext|> <|return|> <|channel|> <|start|> <|end|> <|message|> <|call|>")


def header_of(specials, types=None, **metadata):
    tokens = ["a", *specials]
    given = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL, *specials.values()], np.int32),
        **{f"tokenizer.ggml.{key}_token_id": tokens.index(text) for key, text in metadata.items()},
    }
    return Header(Path("x.gguf"), given, {}, np.zeros(0, np.uint8))


def ends_of(specials, **metadata):
    ids = special_ids(header_of(specials, **metadata))["eos_token_id"] or []
    assert all(isinstance(token, int) for token in ids)
    return [["a", *specials][token] for token in ids]


@pytest.mark.parametrize(
    ("specials", "eos", "ends"),
    [
        (QWEN, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),  # Qwen2.5 and Qwen3
        (QWEN, "<|endoftext|>", ["<|endoftext|>", "<|im_end|>"]),  # their base models
        # In Qwen's vocabulary, </s> is text of HTML that a merge makes.
        ({**QWEN, "</s>": NORMAL, "<eos>": USER_DEFINED}, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"]),
        (LLAMA3, "<|eot_id|>", ["<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"]),
        (GEMMA, "<end_of_turn>", ["<end_of_turn>", "<eos>"]),
        ({**MISTRAL, **QWEN}, "<|im_end|>", ["<|im_end|>", "</s>", "<|endoftext|>"]),  # taught ChatML
        (PHI, "<|endoftext|>", ["<|endoftext|>", "<|end|>"]),
        # Messages of a turn end in <|end|>, after which the model goes on.
        (HARMONY, "<|return|>", ["<|return|>", "<|endoftext|>", "<|call|>"]),
        ({"<|end_of_thought|>": CONTROL}, "<|end_of_thought|>", ["<|end_of_thought|>"]),
        ({"<think>": CONTROL, "</think>": CONTROL, "[/INST]": CONTROL}, None, []),
    ],
)
def test_families(specials, eos, ends):
    assert ends_of(specials, **({} if eos is None else {"eos": eos})) == ends


def test_the_metadata_come_first():
    ends = ends_of({**GEMMA, "<stop>": CONTROL}, eot="<stop>", eom="<bos>", eos="<eos>")
    assert ends == ["<eos>", "<stop>", "<bos>", "<end_of_turn>"]


@pytest.mark.parametrize("kind", [NORMAL, USER_DEFINED, BYTE])
def test_the_text_decides_whatever_the_type(kind):
    assert ends_of(dict.fromkeys(LLAMA3, kind)) == ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"]


class TestWrongTypes:
    def tokenizer(self, specials):
        metadata = byte_level()
        metadata["ggml.tokens"][0] = "<stop>"  # <|end|> may be one of the others
        tokens, types = metadata["ggml.tokens"], metadata["ggml.token_type"]
        metadata |= {"ggml.tokens": [*tokens, *specials], "ggml.token_type": [*types, *specials.values()]}
        given = {f"tokenizer.{key}": value for key, value in metadata.items()}
        return read_tokenizer(Header(Path("x.gguf"), given, {}, np.zeros(0, np.uint8)))

    def test_tokens_of_a_turn_are_not_cut(self, caplog):
        """Some exporters declare Gemma's tokens as text, so that a prompt has them in pieces."""
        specials = {"<start_of_turn>": NORMAL, "<end_of_turn>": NORMAL, "<table>": NORMAL}
        tokenizer = self.tokenizer(specials)
        first = len(tokenizer) - len(specials)
        assert tokenizer.encode("<start_of_turn>a<end_of_turn>") == [
            first,
            *tokenizer.encode("a"),
            first + 1,
        ]
        assert tokenizer.decode([first, first + 1], skip_special_tokens=True) == ""
        assert len(tokenizer.encode("<table>")) > 1  # text, as declared
        [line] = caplog.messages
        assert "x.gguf" in line
        assert f"<start_of_turn> ({first}), <end_of_turn> ({first + 1})" in line
        assert "<table>" not in line

    def test_ends_are_not_shown(self, caplog):
        """A user-defined token is whole in prompts, but would be part of the text."""
        tokenizer = self.tokenizer({"<|im_start|>": USER_DEFINED, "<|im_end|>": USER_DEFINED})
        end = len(tokenizer) - 1
        assert tokenizer.decode([end - 1, end], skip_special_tokens=True) == "<|im_start|>"
        [line] = caplog.messages
        assert f"<|im_end|> ({end})" in line
        assert "<|im_start|>" not in line

    @pytest.mark.parametrize("specials", [QWEN, LLAMA3, GEMMA, PHI, HARMONY, {"</s>": NORMAL}])
    def test_nothing_is_said_of_right_ones(self, caplog, specials):
        self.tokenizer(specials)
        assert caplog.messages == []


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    raw = {**CONFIGS["qwen2"], "vocab_size": 300}
    metadata = byte_level(ggml__eos_token_id=None, ggml__bos_token_id=None)
    tokens, types = metadata["ggml.tokens"], metadata["ggml.token_type"]
    metadata |= {
        "ggml.tokens": [*tokens, *QWEN],
        "ggml.token_type": [*types, CONTROL, CONTROL, NORMAL],
        "ggml.eos_token_id": len(tokens),
    }
    given = {f"tokenizer.{key}": value for key, value in metadata.items()}
    path = write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", raw, random_tensors(raw), metadata=given)
    return LLM(path, dtype="float32")


class TestDecoding:
    def generate(self, llm, words, **settings):
        tokenizer = llm.target.tokenizer
        allowed = [tokenizer.convert_tokens_to_ids(word) for word in words]
        params = SamplingParams(allowed_token_ids=allowed, max_tokens=4, **settings)
        [made] = llm.generate([tokenizer.encode("ab")], params)
        return made

    @pytest.mark.parametrize("end", ["<|endoftext|>", "<|im_end|>"])
    def test_it_ends_a_text(self, llm, end):
        made = self.generate(llm, [end])
        assert (made.finish_reason, len(made.token_ids), made.text) == ("stop", 1, "")

    def test_ignored(self, llm):
        made = self.generate(llm, ["<|im_end|>"], ignore_eos=True)
        assert (made.finish_reason, len(made.token_ids)) == ("length", 4)

    def test_none_before_min_tokens(self, llm):
        ends = [llm.target.tokenizer.convert_tokens_to_ids(word) for word in ("<|endoftext|>", "<|im_end|>")]
        assert llm.target.eos_token_ids == (ends[0], 0, ends[1])
        words = ["<|endoftext|>", "<|im_end|>", "a"]
        bias = {ends[0]: 50.0, ends[1]: 50.0}
        made = self.generate(llm, words, min_tokens=3, logit_bias=bias)
        assert made.text == "aaa"
        assert (made.finish_reason, len(made.token_ids)) == ("stop", 4)
