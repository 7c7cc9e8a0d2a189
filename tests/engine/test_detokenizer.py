"""Texts of random tokens, piece by piece, against the tokenizers library's decoding of whole sequences."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from jetspec_jax.checkpoint.tokenizer import load_tokenizer
from jetspec_jax.demo import DEMO_TARGET
from jetspec_jax.engine.detokenizer import Detokenizer, detokenizer_of, whole_text
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


def run_of_bytes(detokenizer, tokens):
    """The bytes of byte tokens at the beginning of tokens."""
    known = map(detokenizer.look_up, tokens)
    return b"".join(each.data for each in itertools.takewhile(lambda each: each.is_byte, known))


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("skip", [False, True])
@given(data=st.data())
def test_a_continuation_is_what_it_adds_to_its_prompt(name, skip, data):
    backend = BACKENDS[name]()
    size, detokenizer = backend.get_vocab_size(), Detokenizer(backend)
    drawn = st.lists(st.integers(0, min(size, 300)) | st.integers(0, size), max_size=8)
    # Many prompts end in a word, or inside a character of a byte vocabulary.
    text = [byte + 1 for byte in data.draw(st.text("é日🙂", max_size=2)).encode()]
    cut = data.draw(st.integers(0, len(text)))
    word = data.draw(st.lists(st.integers(min(257, size - 1), size - 1), max_size=1))
    prompt, tokens = data.draw(drawn) + word + text[:cut], text[cut:] + data.draw(drawn)
    pieces, known = streamed(detokenizer.stream(skip_special_tokens=skip, prompt=prompt), tokens)
    with_text = [
        [token for token in each if (own := detokenizer.look_up(token)).data and not (skip and own.special)]
        for each in (prompt, tokens)
    ]
    # A prompt's characters are not taken back if a run of bytes turns out to be broken after its end.
    before = run_of_bytes(detokenizer, reversed(with_text[0]))[::-1]
    after = run_of_bytes(detokenizer, with_text[1])
    if not before or whole_text(before + after) is not None:
        whole = backend.decode([*with_text[0], *with_text[1]], skip_special_tokens=False)
        assert detokenizer.decode(with_text[0], continued=True) + "".join(pieces) == whole
    assert all("".join(pieces).startswith(settled) for settled, _ in known)


THE, EQUALS, ONE, FOUR, X, SPACE = 257, 262, 263, 264, 265, 259
C3, A9 = 0xC3 + 1, 0xA9 + 1


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        ([THE], [EQUALS, ONE], " = 1"),
        ([THE, 0x0A + 1], [FOUR, X], "    x"),
        ([THE, SPACE], [THE], " the"),
        ([SPACE], [THE], " the"),  # the prompt's text is empty, and its space is the one that is removed
        ([THE], [0x20 + 1, X], " x"),
        ([], [EQUALS, ONE], "= 1"),
        ([], [SPACE, THE], " the"),
        ([], [0x20 + 1, X], "x"),
        # Special tokens and unknown ones have no text.
        ([EOS], [EQUALS, ONE], "= 1"),
        ([THE, EOS], [EQUALS, ONE], " = 1"),
        ([THE, 999, EOS, EOS, EOS, EOS, EOS], [EQUALS], " ="),
        # A character that the prompt begins belongs to the continuation.
        ([THE, C3], [A9, EQUALS], "é ="),
        ([C3], [A9], "é"),
        ([THE, *(b + 1 for b in "🙂".encode()[:3])], ["🙂".encode()[3] + 1, X], "🙂x"),
        ([THE, C3], [EQUALS], "\N{REPLACEMENT CHARACTER} ="),
        # A complete one is the prompt's, whatever follows.
        ([THE, C3, A9], [C3, A9, EQUALS], "é ="),
        ([THE, 0x0A + 1], [C3, X], "\N{REPLACEMENT CHARACTER}x"),
        ([THE, 0x0A + 1, C3], [A9], "é"),
    ],
)
def test_the_first_space_of_a_continuation(prompt, tokens, text):
    detokenizer = detokenizer_of(llama())
    pieces, known = streamed(detokenizer.stream(skip_special_tokens=True, prompt=prompt), tokens)
    assert "".join(pieces) == text
    assert all(text.startswith(settled) for settled, _ in known)


@pytest.mark.parametrize(("prompt", "held"), [([], ""), ([THE], " ")])
def test_a_byte_that_is_a_space_is_held_back_if_it_stays(prompt, held):
    stream = detokenizer_of(llama()).stream(prompt=prompt)
    assert (stream.feed(0x20 + 1), stream.held) == ("", held)


def test_a_special_token_that_is_shown_is_text():
    stream = detokenizer_of(llama()).stream(prompt=[EOS])
    assert streamed(stream, [EQUALS, ONE])[0] == [" =", " 1", ""]


@pytest.mark.parametrize("name", ["Llama 2", "metaspace"])
def test_a_space_that_a_grammar_counts_is_kept(name):
    backend = BACKENDS[name]()
    the = backend.token_to_id("▁the")
    for prompt in ([], [EOS]) if name == "Llama 2" else ([],):
        stream = Detokenizer(backend).stream(skip_special_tokens=True, prompt=prompt, keep_space=True)
        assert "".join(streamed(stream, [the, the])[0]) == " the the"


def test_no_space_is_added_before_a_text_for_a_grammar():
    backend = BACKENDS["wordpiece"]()
    tokens = [backend.token_to_id(word) for word in ("é", "##s", "é")]
    stream = Detokenizer(backend).stream(keep_space=True)
    assert "".join(streamed(stream, tokens)[0]) == "és é"


def test_a_prompt_is_looked_at_from_its_end():
    detokenizer = detokenizer_of(llama())

    class End(list):
        """A prompt of which the last tokens alone may be read."""

        def __reversed__(self):
            yield from [EOS, EOS, THE, THE, THE, THE]
            pytest.fail("more tokens of the prompt are read than can change the text")

    assert detokenizer.stream(skip_special_tokens=True, prompt=End()).feed(EQUALS) == " ="


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
    assert gemma.token_text(257, begins=True) == " the"
    assert llama_2.token_text(257, begins=True) == "the"
    assert llama_2.token_text(0x20 + 1, begins=True) == ""
    assert llama_2.token_text(C3, begins=True) == "\N{REPLACEMENT CHARACTER}"
    assert level.token_bytes(HIGH) == b"b\xe6"
    assert level.token_text(HIGH) == "b\N{REPLACEMENT CHARACTER}"
    assert detokenizer_of(byte_level()) is level
    assert detokenizer_of(None) is None


class Counted:
    """Counts the tokens that a tokenizer decodes."""

    def __init__(self, backend):
        self.backend, self.tokens = backend, 0
        self.decoder = SimpleNamespace(decode=self.join)

    def join(self, words):
        self.tokens += len(words)
        return self.backend.decoder.decode(words)

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
    assert len(tokens) * (name != "byte-level") <= counted.tokens <= 3 * len(tokens)
