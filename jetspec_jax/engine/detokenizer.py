"""Decodes tokens to bytes and to text: single tokens, and growing sequences.

A token may end within a character, in two kinds of vocabularies:

* A byte-level vocabulary (GPT-2's, and those of most current models) writes tokens in 256 characters that
  stand for bytes. A text is the UTF-8 of the bytes of its tokens.
* A vocabulary with byte fallback (Gemma's, Llama 2's) has words, and the tokens ``<0x00>`` to ``<0xFF>`` for
  all other characters. A run of byte tokens is decoded as UTF-8 if all of it is valid, else as one
  replacement character for each byte: ``<0x0A> <0xC3> a`` loses its line break too. So the text of a byte
  token is final only when its run has ended.
"""

import codecs
import re
from abc import ABC, abstractmethod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokenizers.pre_tokenizers import ByteLevel

# The token of a byte in a vocabulary with byte fallback.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# Text before a token that is decoded: some decoders remove a space at the start of a text.
_BEFORE = "a"


def _byte_level_bytes() -> dict[str, int]:
    """The byte of each character of a byte-level vocabulary.

    Printable Latin-1 bytes are their own characters; all others are the characters from U+0100 on, in order.
    """
    alphabet = sorted(ByteLevel.alphabet())
    printable = [character for character in alphabet if ord(character) < 256]
    others = sorted({*range(256)} - {*map(ord, printable)})
    return dict(zip(alphabet, [*map(ord, printable), *others], strict=True))


_BYTE_OF = _byte_level_bytes()


def whole_text(data: bytes) -> str | None:
    """A token's bytes as text; None if they are not valid UTF-8, such as a part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


class _Token(NamedTuple):
    data: bytes  # empty if the tokenizer lacks it
    is_byte: bool  # of byte fallback
    special: bool  # ``skip_special_tokens`` removes it


class Detokenizer:
    """Decodes the tokens of one tokenizer; thread-safe."""

    def __init__(self, backend: Any):
        """Detects how a tokenizer of the tokenizers library splits characters."""
        self._backend = backend
        self._join = " ".join if backend.decoder is None else backend.decoder.decode
        self._byte_level = self._join(["Ã", "©"]) == "é"
        self._byte_fallback = self._join(["<0xC3>", "<0xA9>"]) == "é"
        self._tokens: dict[int, _Token] = {}

    def token_bytes(self, token: int) -> bytes:
        """A token's bytes within a text: the bytes of a text's tokens, joined, are the text's."""
        return self.look_up(token).data

    def token_text(self, token: int) -> str:
        """A token's bytes as text; incomplete characters become replacement characters."""
        return self.token_bytes(token).decode(errors="replace")

    def stream(self, *, skip_special_tokens: bool = False) -> "TextStream":
        """An incremental decoder of one sequence."""
        kind = _ByteLevelStream if self._byte_level else _WordStream
        return kind(self, skip_special_tokens)

    def decode(self, tokens: list[int]) -> str:
        """The text of a whole sequence, special tokens included."""
        return self._backend.decode(tokens, skip_special_tokens=False)

    def look_up(self, token: int) -> _Token:
        """A token's properties, cached."""
        known = self._tokens.get(token)
        if known is None:
            known = self._tokens[token] = self._read(token)
        return known

    def _read(self, token: int) -> _Token:
        word = self._backend.id_to_token(token)
        if word is None:
            return _Token(b"", False, False)
        special = self.decode([token]) != self._backend.decode([token], skip_special_tokens=True)
        if self._byte_level:
            # Added tokens may have other characters: the library uses such a word unchanged.
            inside = all(character in _BYTE_OF for character in word)
            data = bytes(_BYTE_OF[character] for character in word) if inside else word.encode()
            return _Token(data, False, special)
        if self._byte_fallback and (match := _BYTE.fullmatch(word)):
            return _Token(bytes.fromhex(match[1]), True, special)
        if self._backend.decoder is None:
            return _Token(word.encode(), False, special)
        before, both = self._join([_BEFORE]), self._join([_BEFORE, word])
        text = both[len(before) :] if both.startswith(before) else self._join([word])
        return _Token(text.encode(), False, special)


class TextStream(ABC):
    """The text of a growing sequence of tokens.

    The joined results of `feed` and `end` equal the tokenizer's decoding of the whole sequence. The time is
    linear in the number of tokens.
    """

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool):
        self._detokenizer, self._skip_special = detokenizer, skip_special_tokens

    def feed(self, token: int) -> str:
        """The text that a token makes final: no later token can change it."""
        known = self._detokenizer.look_up(token)
        return "" if not known.data or (known.special and self._skip_special) else self._add(token, known)

    @property
    def held(self) -> str:
        """Whole characters after the final text, which later tokens may still replace."""
        return ""

    @abstractmethod
    def _add(self, token: int, known: _Token) -> str: ...

    @abstractmethod
    def end(self) -> str:
        """The rest of the text; no token may follow."""


class _ByteLevelStream(TextStream):
    """Text as the UTF-8 of all bytes: only an incomplete character is held back."""

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool):
        super().__init__(detokenizer, skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _add(self, token: int, known: _Token) -> str:
        return self._decoder.decode(known.data)

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WordStream(TextStream):
    """Text as words: only a run of byte tokens is held back.

    The library's decoder joins each word to the word before it, which may add a space, or remove one at the
    start of the text.
    """

    def __init__(self, detokenizer: Detokenizer, skip_special_tokens: bool):
        super().__init__(detokenizer, skip_special_tokens)
        self._last: list[int] = []
        self._begin_run()

    def _begin_run(self) -> None:
        self._run: list[int] = []
        self._held, self._valid = "", True
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    @property
    def held(self) -> str:
        return self._held

    def _add(self, token: int, known: _Token) -> str:
        self._run.append(token)
        if not known.is_byte:
            return self.end()
        if self._valid:
            try:
                self._held += self._decoder.decode(known.data)
            except UnicodeDecodeError:
                self._held, self._valid = "", False
        return ""

    def end(self) -> str:
        whole = [*self._last, *self._run]
        text = self._detokenizer.decode(whole)[len(self._detokenizer.decode(self._last)) :]
        self._last = whole[-1:]
        self._begin_run()
        return text


_DETOKENIZERS: WeakKeyDictionary[Any, Detokenizer] = WeakKeyDictionary()


def detokenizer_of(tokenizer: Any) -> Detokenizer | None:
    """The detokenizer of a transformers tokenizer, cached by tokenizer; None for None."""
    if tokenizer is None:
        return None
    known = _DETOKENIZERS.get(tokenizer)
    if known is None:
        known = _DETOKENIZERS[tokenizer] = Detokenizer(tokenizer.backend_tokenizer)
    return known
