"""Texts of random tokens, piece by piece, against the tokenizers library's decoding of whole sequences."""

import functools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.engine.detokenizer import Detokenizer, detokenizer_of
from tests.vocabularies import EOS, HIGH, byte_fallback, byte_level

VALID = "naïve 日本 🙂\n"


@functools.cache
def demo():
    return load_tokenizer(DEMO_TARGET)


@functools.cache
def llama():
    return byte_fallback(strip=True)


def plain(decoder):
    """A tokenizer of words alone, without a token for a byte."""
    words = ["<0x41>", "▁the", "é", "##s", "Ã", "end</w>", "\N{REPLACEMENT CHARACTER}"]
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "é"))
    if decoder is not None:
        backend.decoder = decoder
    return backend


BACKENDS = {
    "demo": lambda: demo().backend_tokenizer,
    "byte-level": lambda: byte_level().backend_tokenizer,
    "Gemma": lambda: byte_fallback().backend_tokenizer,
    "Llama 2": lambda: llama().backend_tokenizer,
    "words": functools.cache(lambda: plain(None)),
    "fused": functools.cache(lambda: plain(decoders.Fuse())),
    "metaspace": functools.cache(lambda: plain(decoders.Metaspace())),
    "wordpiece": functools.cache(lambda: plain(decoders.WordPiece())),
    "suffixes": functools.cache(lambda: plain(decoders.BPEDecoder("</w>"))),
}


def streamed(stream, tokens):
    """The pieces, and what was known after each: the settled text, and all with the characters held back."""
    pieces, known = [], []
    for token in tokens:
        pieces.append(stream.feed(token))
        known.append(("".join(pieces), "".join(pieces) + stream.held))
    return [*pieces, stream.end()], known


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("skip", [False, True])
@given(data=st.data())
def test_the_pieces_are_the_whole(name, skip, data):
    backend = BACKENDS[name]()
    size = backend.get_vocab_size()
    # Also an id that the tokenizer lacks, as a padded vocabulary has; bytes come first in all vocabularies.
    tokens = data.draw(st.lists(st.integers(0, min(size, 300)) | st.integers(0, size), max_size=40))
    pieces, known = streamed(Detokenizer(backend).stream(skip_special_tokens=skip), tokens)
    whole = backend.decode(tokens, skip_special_tokens=skip)
    assert "".join(pieces) == whole
    assert all(whole.startswith(settled) for settled, _ in known)
    if tokens:
        # What is held back was the text when its last character was complete, at most three tokens before.
        count = data.draw(st.integers(1, len(tokens)))
        texts = (backend.decode(tokens[:end], skip_special_tokens=skip) for end in range(count + 1)[-4:])
        assert any(text.startswith(known[count - 1][1]) for text in texts)


@pytest.mark.parametrize("name", ["demo", "byte-level", "Gemma", "Llama 2"])
@given(text=st.text(max_size=20) | st.just(VALID))
def test_the_bytes_of_tokens_are_those_of_the_text(name, text):
    backend = BACKENDS[name]()
    detokenizer = Detokenizer(backend)
    tokens = backend.encode(text).ids if name == "demo" else [byte + 1 for byte in text.encode()]
    assert b"".join(map(detokenizer.token_bytes, tokens)) == text.encode()


def test_tokens_alone():
    gemma, llama_2, level = map(detokenizer_of, (byte_fallback(), llama(), byte_level()))
    for detokenizer in (gemma, llama_2):
        assert detokenizer.token_bytes(0xC3 + 1) == b"\xc3"
        assert detokenizer.token_text(0xC3 + 1) == "\N{REPLACEMENT CHARACTER}"
        assert (
            detokenizer.token_text(257) == " the"
        )  # as it continues a text, also where its start has no space
        assert detokenizer.token_bytes(999) == b""
        assert detokenizer.token_text(EOS) == "<eos>"
    assert level.token_bytes(HIGH) == b"b\xe6"
    assert level.token_text(HIGH) == "b\N{REPLACEMENT CHARACTER}"
    assert detokenizer_of(byte_level()) is level
    assert detokenizer_of(None) is None


class Counted:
    """Counts the tokens that a tokenizer decodes."""

    def __init__(self, backend):
        self.backend, self.decoder, self.tokens = backend, backend.decoder, 0

    def id_to_token(self, token):
        return self.backend.id_to_token(token)

    def decode(self, tokens, *, skip_special_tokens):
        self.tokens += len(tokens)
        return self.backend.decode(tokens, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize("name", ["byte-level", "Gemma"])
@pytest.mark.parametrize("byte", [0x0A, 0xC3, 0xE6])
def test_a_long_run_is_decoded_in_linear_time(name, byte):
    counted = Counted(BACKENDS[name]())
    tokens = [byte + 1] * 2000 + [0x61 + 1, *[257] * 100]
    pieces, _ = streamed(Detokenizer(counted).stream(), tokens)
    assert "".join(pieces) == counted.backend.decode(tokens)
    assert counted.tokens <= 3 * len(tokens)
