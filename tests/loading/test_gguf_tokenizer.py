"""Tokenizers that are built of a GGUF file's metadata, against the rules that they stand for."""

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from jetspec_jax import CheckpointError, load_target
from jetspec_jax.checkpoint.gguf.header import Header
from jetspec_jax.checkpoint.gguf.tokenizer import SPLITS, read_tokenizer
from tests.loading.gguf_files import CONFIGS, random_tensors, write_gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LETTERS = "abcde"


def tokenizer_of(metadata, architecture="llama"):
    """The tokenizer of metadata whose keys lack their beginning."""
    own = {f"tokenizer.{key}": value for key, value in metadata.items() if value is not None}
    return read_tokenizer(
        Header(Path("x.gguf"), {"general.architecture": architecture, **own}, {}, np.zeros(0, np.uint8))
    )


def byte_level(**changes):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = ["Ġ a", "a b", "ab c", "1 2", "12 3", "Ċ Ċ", "' s", "Ġ 1"]
    tokens = ["<|end|>", "<think>", *alphabet, *(merge.replace(" ", "") for merge in merges)]
    types = [CONTROL, USER_DEFINED] + [NORMAL] * (len(tokens) - 2)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "smollm",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": merges,
        "ggml.eos_token_id": 0,
        "ggml.bos_token_id": 0,
        "chat_template": "{% for m in messages %}{{ m['content'] }}<|end|>{% endfor %}",
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


def pieces(tokenizer, text):
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text))


class TestByteLevel:
    @pytest.mark.parametrize(
        ("pre", "words"),
        [
            # Digits are cut off first, so the spaces before one end their piece, and stay together.
            ("smollm", ["a", "Ġ", "1", "2", "ĊĠĠ", "3", "'s", "Ġb", "!"]),
            # A line's end is cut off, and the last of several spaces kept for a word, which digits are not.
            ("llama-bpe", ["a", "Ġ", "12", "Ċ", "Ġ", "Ġ", "3", "'s", "Ġb", "!"]),
            ("qwen2", ["a", "Ġ", "1", "2", "Ċ", "Ġ", "Ġ", "3", "'s", "Ġb", "!"]),
            # A space is kept for digits, and then cut off from them.
            ("default", ["a", "Ġ", "12", "ĊĠ", "Ġ", "3", "'", "s", "Ġb", "!"]),
        ],
    )
    def test_words(self, pre, words):
        tokenizer = tokenizer_of(byte_level(ggml__pre=pre))
        cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a 12\n  3's b!")
        assert [word for word, _ in cut] == words

    def test_long_numbers(self):
        cut = {pre: tokenizer_of(byte_level(ggml__pre=pre)).backend_tokenizer.pre_tokenizer for pre in SPLITS}
        words = {pre: [word for word, _ in own.pre_tokenize_str("12345")] for pre, own in cut.items()}
        assert words["llama-bpe"] == words["default"] == ["123", "45"]
        assert words["smollm"] == words["qwen2"] == list("12345")

    def test_merges(self):
        assert pieces(tokenizer_of(byte_level()), "abc ab") == ["abc", "Ġa", "b"]

    def test_whole_words(self):
        """Llama 3 takes a word that is a token as it is, even where no merges lead to it."""
        tokens = byte_level()["ggml.tokens"]
        changes = {"ggml__tokens": [*tokens, "edc"], "ggml__token_type": None, "ggml__merges": ["a b"]}
        whole = tokenizer_of(byte_level(ggml__pre="llama-bpe", **changes, ggml__add_bos_token=False))
        assert pieces(whole, "edc") == ["edc"]
        assert pieces(tokenizer_of(byte_level(**changes)), "edc") == ["e", "d", "c"]

    def test_composed(self):
        """Qwen's text is composed: an e and its accent are one character."""
        assert (
            tokenizer_of(byte_level(ggml__pre="qwen2")).decode(
                tokenizer_of(byte_level(ggml__pre="qwen2")).encode("e\u0301")
            )
            == "\u00e9"
        )

    def test_any_text_comes_back(self):
        tokenizer = tokenizer_of(byte_level())
        for text in ("Größe  naïve\n\n\t漢字 🙂 12\r\n", " x", "", "<think>a</think>"):
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_special_tokens(self):
        tokenizer = tokenizer_of(byte_level())
        assert pieces(tokenizer, "a<|end|><think>b") == ["a", "<|end|>", "<think>", "b"]
        assert tokenizer.decode(tokenizer.encode("a<|end|><think>b"), skip_special_tokens=True) == "a<think>b"
        assert tokenizer.eos_token_id == tokenizer.bos_token_id == 0
        assert tokenizer.unk_token is tokenizer.pad_token is None

    @pytest.mark.parametrize(
        ("changes", "added"),
        [
            ({}, (0, 0)),
            ({"ggml__pre": "llama-bpe"}, (1, 0)),
            ({"ggml__pre": "llama-bpe", "ggml__add_bos_token": False}, (0, 0)),
            ({"ggml__add_bos_token": True, "ggml__add_eos_token": True}, (1, 1)),
        ],
    )
    def test_first_and_last(self, changes, added):
        before, after = added
        ids = tokenizer_of(byte_level(**changes)).encode("a")
        assert ids == [0] * before + tokenizer_of(byte_level()).encode("a") + [0] * after

    def test_template(self):
        tokenizer = tokenizer_of(byte_level())
        chat = [{"role": "user", "content": "ab"}]
        assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab<|end|>"

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"ggml__pre": "tekken"}, "ggml.pre is 'tekken', .* supported: default, smollm, .*tokenizer="),
            ({"ggml__model": "bert"}, r"kind 'bert' .* supported: gpt2, llama; give a tokenizer's folder"),
            ({"ggml__token_type": [1]}, "another length than"),
            ({"ggml__merges": ["a b", "x"]}, "holds 1 that join no two tokens to a third"),
            ({"chat_template": ["a"]}, "chat_template must be a string, not list"),
            ({"ggml__eos_token_id": 10**6}, "eos_token_id 1000000 lies outside"),
            ({"ggml__eos_token_id": -1}, "eos_token_id must be a token id, not -1"),
        ],
    )
    def test_refused(self, changes, complaint):
        with pytest.raises(ValueError, match=complaint):
            tokenizer_of(byte_level(**changes))

    @pytest.mark.parametrize("model", [None, "none", "no_vocab"])
    def test_none(self, model):
        assert tokenizer_of(byte_level(ggml__model=model)) is None


def sentence_piece(seed, *, positions=False, **changes):
    """Random pieces of a few letters with scores; with ``positions`` their order is that of their places."""
    rng = random.Random(seed)
    pieces = {"".join(rng.choices(LETTERS + "▁", k=rng.randint(2, 4))) for _ in range(60)}
    pieces = sorted({own for own in pieces if "▁▁" not in own} | {f"▁{letter}" for letter in LETTERS})
    rng.shuffle(pieces)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, "▁", *LETTERS]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [-1000.0 - i for i in range(6)]
    if positions:
        rest = scores[259:]
        rng.shuffle(rest)
        scores[259:] = rest
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": tokens,
        "ggml.scores": scores,
        "ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259),
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **{key.replace("__", "."): value for key, value in changes.items()},
    }


def merged(text, ranks):
    """SentencePiece's rule: again and again the two neighbours are joined that make the best piece."""
    parts = list(text)
    while True:
        joined = [(ranks[a + b], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ranks]
        if not joined:
            return parts
        at = -max(joined)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


class TestSentencePiece:
    @pytest.mark.parametrize("architecture", ["llama", "gemma3"])
    @pytest.mark.parametrize("seed", range(5))
    def test_the_best_pieces_first(self, seed, architecture):
        metadata = sentence_piece(seed, positions=architecture == "gemma3", ggml__add_bos_token=False)
        tokenizer = tokenizer_of(metadata, architecture)
        tokens, scores = metadata["ggml.tokens"], metadata["ggml.scores"]
        if architecture == "gemma3":
            scores = [-i for i in range(len(tokens))]
        ranks = dict(zip(tokens[259:], scores[259:], strict=True))
        rng = random.Random(seed)
        for _ in range(100):
            text = "".join(rng.choices(LETTERS + " ", k=rng.randint(1, 30)))
            assert pieces(tokenizer, text) == merged("▁" + text.replace(" ", "▁"), ranks), repr(text)

    def test_scores_are_missing(self):
        with pytest.raises(ValueError, match="scores are 1, and there are"):
            tokenizer_of(sentence_piece(0, ggml__scores=[1.0]))

    def test_bytes_of_unknown_characters(self):
        tokenizer = tokenizer_of(sentence_piece(0))
        assert pieces(tokenizer, "é")[-2:] == ["<0xC3>", "<0xA9>"]
        for text in ("aé b\n漢", "a", " ab"):
            assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text

    @pytest.mark.parametrize(("changes", "first"), [({}, "<s>"), ({"ggml__add_bos_token": False}, "▁a")])
    def test_first_token(self, changes, first):
        assert pieces(tokenizer_of(sentence_piece(0, **changes)), "a")[0] == first

    def test_without_a_space_in_front(self):
        tokenizer = tokenizer_of(sentence_piece(0, ggml__add_space_prefix=False, ggml__add_bos_token=False))
        assert pieces(tokenizer, "a") == ["a"]
        assert tokenizer.decode(tokenizer.encode(" a")) == " a"

    def test_several_spaces(self):
        metadata = sentence_piece(0, ggml__add_space_prefix=False, ggml__add_bos_token=False)
        tokens = [*metadata["ggml.tokens"], "  "]
        more = {
            "ggml.tokens": tokens,
            "ggml.scores": [*metadata["ggml.scores"], 5.0],
            "ggml.token_type": None,
        }
        tokenizer = tokenizer_of({**metadata, **more})
        assert pieces(tokenizer, "  ") == ["▁▁"]


class TestFile:
    def write(self, tmp_path, **changes):
        raw = {**CONFIGS["qwen2"], "vocab_size": 300}
        tokens = {f"tokenizer.{key}": value for key, value in byte_level(**changes).items()}
        return write_gguf(tmp_path / "x.gguf", raw, random_tensors(raw), metadata=tokens)

    def test_it_is_the_targets(self, tmp_path):
        target = load_target(self.write(tmp_path), dtype="float32")
        assert pieces(target.tokenizer, "abc ab") == ["abc", "Ġa", "b"]
        assert target.eos_token_ids == (0,)

    def test_another_in_its_place(self, tmp_path):
        path = self.write(tmp_path, ggml__pre="tekken")
        with pytest.raises(CheckpointError, match=r"x.gguf: tokenizer.ggml.pre is 'tekken'"):
            load_target(path)
        tokenizer_of(byte_level()).save_pretrained(tmp_path / "tokenizer")
        target = load_target(path, dtype="float32", tokenizer=tmp_path / "tokenizer")
        assert pieces(target.tokenizer, "abc ab") == ["abc", "Ġa", "b"]

    def test_there_is_none(self, tmp_path):
        (tmp_path / "empty").mkdir()
        with pytest.raises(FileNotFoundError, match="empty holds no tokenizer"):
            load_target(self.write(tmp_path), dtype="float32", tokenizer=tmp_path / "empty")
