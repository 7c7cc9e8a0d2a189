"""Decodes tokens to bytes and to text: single tokens, and growing sequences.

A token may end within a character, in two kinds of vocabularies:

* A byte-level vocabulary (GPT-2's, and those of most current models) writes tokens in 256 characters that
  stand for bytes. A text is the UTF-8 of the bytes of its tokens.
* A vocabulary with byte fallback (Gemma's, Llama 2's) has words, and the tokens ``<0x00>`` to ``<0xFF>`` for
  all other characters. A run of byte tokens is decoded as UTF-8 if all of it is valid, else as one
  replacement character for each byte: ``<0x0A> <0xC3> a`` loses its line break too. So the text of a byte
  token is final only when its run has ended.

Some decoders remove a space at the beginning of a text (Llama 2's, Mistral 7B's), because their tokenizers
put one before each text. A text that continues another one keeps that space: see `Detokenizer.stream`.
"""

import codecs
import re
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from tokenizers.pre_tokenizers import ByteLevel

# The token of a byte in a vocabulary with byte fallback.
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
# The most bytes of a character that lacks some.
_MOST_OPEN = 3


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
    word: str
    data: bytes  # within a text; empty if the tokenizer lacks the token
    first: bytes  # at the beginning of a text
    is_byte: bool  # of byte fallback
    special: bool  # ``skip_special_tokens`` removes it


# Text before a token that is decoded within a text.
_BEFORE = _Token("a", b"a", b"a", False, False)


def _open_bytes(tokens: Sequence[_Token]) -> bytes:
    """The bytes at the end of tokens that begin a character, at most three."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(b"".join(token.data for token in tokens[-_MOST_OPEN:]))
    return decoder.getstate()[0]


class Detokenizer:
    """Decodes the tokens of one tokenizer; thread-safe."""

    def __init__(self, backend: Any):
        """Detects how a tokenizer of the tokenizers library splits characters."""
        self._backend = backend
        self.join = " ".join if backend.decoder is None else backend.decoder.decode
        self._byte_level = self.join(["Ã", "©"]) == "é"
        self._byte_fallback = self.join(["<0xC3>", "<0xA9>"]) == "é"
        self._adds_spaces = self.join(["a", "b"]) != "ab"
        self._tokens: dict[int, _Token] = {}

    def token_bytes(self, token: int) -> bytes:
        """A token's bytes within a text: the bytes of a text's tokens, joined, are the text's."""
        return self.look_up(token).data

    def token_text(self, token: int, *, begins: bool = False) -> str:
        """The text of a token's bytes within a text, or, if it ``begins`` one, at its beginning.

        Incomplete characters become replacement characters.
        """
        known = self.look_up(token)
        return (known.first if begins else known.data).decode(errors="replace")

    def stream(
        self,
        *,
        skip_special_tokens: bool = False,
        kept: Collection[int] = (),
        prompt: Sequence[int] = (),
        keep_space: bool = False,
    ) -> "TextStream":
        """An incremental decoder of one sequence, which continues a ``prompt``.

        Its text is what it adds to the prompt's, with all of a character that the prompt begins and does not
        complete. Special tokens can have no text, but for those that are ``kept``. With ``keep_space`` a text
        keeps the space at its beginning: grammars count it.
        """
        before: list[_Token] = []
        shown = kept if skip_special_tokens else None
        for token in reversed(prompt):
            if (known := self.visible(token, shown)) is not None:
                before.insert(0, known)
                if len(before) > _MOST_OPEN:
                    break
        if keep_space and not before and not self._adds_spaces:
            before = [_BEFORE]
        kind = TextStream if self._byte_level else _WordStream
        return kind(self, shown, before)

    def decode(self, tokens: Sequence[int], *, continued: bool = False) -> str:
        """The text of a whole sequence, special tokens included.

        If it is ``continued``, a character that it begins and does not complete belongs to the continuation.
        """
        known = [token for token in map(self.look_up, tokens) if token.data] if continued else []
        if not (missing := len(_open_bytes(known))):
            return self._backend.decode(tokens, skip_special_tokens=False)
        if self._byte_level:
            return b"".join(token.data for token in known)[:-missing].decode(errors="replace")
        return self.join([token.word for token in known[:-missing]])

    def look_up(self, token: int) -> _Token:
        """A token's properties, cached."""
        known = self._tokens.get(token)
        if known is None:
            known = self._tokens[token] = self._read(token)
        return known

    def visible(self, token: int, kept: Collection[int] | None) -> _Token | None:
        """A token that has text, else None; special tokens have text if ``kept`` has them or is None."""
        known = self.look_up(token)
        skipped = known.special and kept is not None and token not in kept
        return None if skipped or not known.data else known

    def _read(self, token: int) -> _Token:
        word = self._backend.id_to_token(token)
        if word is None:
            return _Token("", b"", b"", False, False)
        special = self.decode([token]) != self._backend.decode([token], skip_special_tokens=True)
        if self._byte_level:
            # Added tokens may have other characters: the library uses such a word unchanged.
            inside = all(character in _BYTE_OF for character in word)
            data = bytes(_BYTE_OF[character] for character in word) if inside else word.encode()
            return _Token(word, data, data, False, special)
        first = self.join([word])
        if self._byte_fallback and (match := _BYTE.fullmatch(word)):
            data = bytes.fromhex(match[1])
            return _Token(word, data, first.encode() if data.isascii() else data, True, special)
        if self._backend.decoder is None:
            return _Token(word, word.encode(), word.encode(), False, special)
        before, both = self.join([_BEFORE.word]), self.join([_BEFORE.word, word])
        text = both[len(before) :] if both.startswith(before) else first
        return _Token(word, text.encode(), first.encode(), False, special)


class TextStream:
    """The text of a growing sequence of tokens: the UTF-8 of all bytes.

    Only an incomplete character is held back. The joined results of `feed` and `end` equal the tokenizer's
    decoding of the whole sequence, or, after a prompt, what the sequence adds to the prompt's. The time is
    linear in the number of tokens.
    """

    #: Whether the next token's text is decoded as the beginning of a text.
    begins = False
    #: Whole characters after the final text, which later tokens may still replace.
    held = ""

    def __init__(self, detokenizer: Detokenizer, kept: Collection[int] | None, before: Sequence[_Token]):
        self._detokenizer, self._kept = detokenizer, kept
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(_open_bytes(before))

    def feed(self, token: int) -> str:
        """The text that a token makes final: no later token can change it."""
        known = self._detokenizer.visible(token, self._kept)
        return "" if known is None else self._add(known)

    def _add(self, known: _Token) -> str:
        return self._decoder.decode(known.data)

    def end(self) -> str:
        """The rest of the text; no token may follow."""
        return self._decoder.decode(b"", final=True)


class _WordStream(TextStream):
    """Text as words: only a run of byte tokens is held back.

    The library's decoder joins each word to the word before it, which may add a space, or remove one at the
    start of the text.
    """

    def __init__(self, detokenizer: Detokenizer, kept: Collection[int] | None, before: Sequence[_Token]):
        self._detokenizer, self._kept = detokenizer, kept
        self._begin_run()
        complete = len(before) - len(_open_bytes(before))
        # A byte of the prompt would make a run with the sequence's bytes.
        self._last = [(_BEFORE if known.is_byte else known).word for known in before[:complete][-1:]]
        for known in before[complete:]:
            self._add(known)

    def _begin_run(self) -> None:
        self._run: list[str] = []
        self.held, self._valid = "", True
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")

    @property
    def begins(self) -> bool:
        return not self._last and not self._run

    def _add(self, known: _Token) -> str:
        data = known.first if self.begins else known.data
        self._run.append(known.word)
        if not known.is_byte:
            return self.end()
        if self._valid:
            try:
                self.held += self._decoder.decode(data)
            except UnicodeDecodeError:
                self.held, self._valid = "", False
        return ""

    def end(self) -> str:
        whole = [*self._last, *self._run]
        text = self._detokenizer.join(whole)[len(self._detokenizer.join(self._last)) :]
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
