"""Builds the tokenizer and the chat template from a GGUF file's metadata."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jetspec_jax.arguments import shown
from jetspec_jax.checkpoint.gguf.header import Header
from jetspec_jax.checkpoint.gguf.vocabulary import (
    CONTROL,
    KEYS,
    USER_DEFINED,
    has_tokenizer,
    listed,
    read_vocabulary,
    token_id,
)
from jetspec_jax.checkpoint.library import import_transformers

_log = logging.getLogger("jetspec_jax")

#: Advice if the tokenizer cannot be built.
WAY_OUT = "give a tokenizer's folder instead (tokenizer=, on the command line --tokenizer)"

# Characters of all tokens that are cut out of a text first; the library needs 80 bytes of memory for each.
MAX_ADDED = 2**22
# The sum of all tokens' squared lengths, which bounds the time to find merges: about a second.
MAX_SQUARES = 2**30
# SentencePiece's character for a space.
_SPACE = "▁"

_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_NEWER_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)


class Split(NamedTuple):
    """The pre-tokenisation of text, before bytes are merged.

    Attributes:
        patterns: Regular expressions that split the text in turn.
        whole_words: Whether a word that is a token is kept without applying merges.
        composed: Whether Unicode characters are composed first (NFC).
        add_bos: Whether texts begin with the BOS token by default.
    """

    patterns: tuple[str, ...]
    whole_words: bool = False
    composed: bool = False
    add_bos: bool = False


#: Splits by ``tokenizer.ggml.pre``. A wrong one would silently give other ids, so unknown names are refused.
SPLITS: Mapping[str, Split] = {
    "default": Split((r"[\p{P}\$\+<=>\^~\|]+", _WORDS, r"\p{N}+", "[0-9][0-9][0-9]")),
    "smollm": Split((r"\p{N}", _WORDS)),
    "llama-bpe": Split((_NEWER_WORDS % 3,), whole_words=True, add_bos=True),
    "qwen2": Split(((_NEWER_WORDS % 1).replace("{1,1}", ""),), composed=True),
}


def read_tokenizer(header: Header) -> Any:
    """The transformers tokenizer of a file; None if it has none.

    The log mentions tokens whose type in the file is wrong.
    """
    metadata = header.metadata
    if not has_tokenizer(metadata):
        return None
    kind, vocabulary = metadata[f"{KEYS}model"], read_vocabulary(header)
    tokens = vocabulary.tokens
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"{KEYS}tokens holds a token twice")
    if kind == "gpt2":
        built, add_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        built, add_bos = _sentence_piece(metadata, tokens), True
    else:
        raise ValueError(
            f"tokenizer of kind {shown(kind)} ({KEYS}model) is not supported; supported: gpt2, llama; "
            f"{WAY_OUT}"
        )
    types = dict(zip(tokens, vocabulary.types, strict=True))
    added = [token for token in tokens if types[token] in (CONTROL, USER_DEFINED)]
    if (size := sum(map(len, added))) > MAX_ADDED:
        raise ValueError(
            f"{KEYS}tokens has {size:,} characters in control and user-defined tokens; the most are "
            f"{MAX_ADDED:,}"
        )
    built.add_tokens(
        [AddedToken(token, normalized=False, special=types[token] == CONTROL) for token in added]
    )
    if (count := built.get_vocab_size()) != len(tokens):
        raise ValueError(f"{KEYS}tokens are {len(tokens)}, and they make a tokenizer of {count}")
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template must be a string, not {type(template).__name__}")
    if vocabulary.retyped:
        wrong = ", ".join(f"{tokens[number]} ({number})" for number in vocabulary.retyped)
        _log.warning("%s declares %s as text; read as control tokens, as their names say", header.path, wrong)
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=built,
        **_special_tokens(metadata, tokens),
        add_bos_token=metadata.get(f"{KEYS}add_bos_token", add_bos),
        add_eos_token=metadata.get(f"{KEYS}add_eos_token", False),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    found = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = token_id(metadata, f"{key}_token_id")
        if token is None:
            continue
        if token >= len(tokens):
            raise ValueError(f"{KEYS}{key}_token_id {token} lies outside the vocabulary of {len(tokens)}")
        found[f"{name}_token"] = tokens[token]
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """A byte-level BPE tokenizer as in GPT-2, and whether texts begin with the BOS token."""
    name = metadata.get(f"{KEYS}pre")
    if not isinstance(name, str) or name not in SPLITS:
        raise ValueError(
            f"{KEYS}pre is {shown(name)}, so text would be cut in an unknown way; "
            f"supported: {', '.join(SPLITS)}; "
            f"{WAY_OUT}"
        )
    split, vocab = SPLITS[name], {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 2)) for merge in listed(metadata, "merges", str)]
    if wrong := [
        pair for pair in merges if len(pair) != 2 or not all(part in vocab for part in (*pair, "".join(pair)))
    ]:
        raise ValueError(
            f"{KEYS}merges holds {len(wrong)} that join no two tokens to a third, such as {shown(wrong[0])}"
        )
    built = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
    if split.composed:
        built.normalizer = normalizers.NFC()
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    built.decoder = decoders.ByteLevel()
    return built, split.add_bos


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """A SentencePiece BPE tokenizer with byte fallback, as in Llama 2 and Gemma."""
    import_transformers()
    from transformers.tokenization_utils_base import generate_merges

    # Files have plain spaces in Gemma's tokens of several spaces.
    tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
    if (squares := sum(len(token) ** 2 for token in tokens)) > MAX_SQUARES:
        raise ValueError(
            f"{KEYS}tokens has too many long tokens: the squares of their lengths have the sum "
            f"{squares:,}, and the most is {MAX_SQUARES:,}"
        )
    vocab = {token: number for number, token in enumerate(tokens)}
    prefix = metadata.get(f"{KEYS}add_space_prefix", True)
    if metadata.get("general.architecture") == "gemma3":
        # Gemma's scores do not give the order of merges; the token ids do.
        scores = {token: -float(number) for token, number in vocab.items()}
    else:
        given = listed(metadata, "scores", float)
        if len(given) != len(tokens):
            raise ValueError(f"{KEYS}scores are {len(given)}, and there are {len(tokens)} tokens")
        scores = dict(zip(tokens, given, strict=True))
    unknown = _special_tokens(metadata, tokens).get("unk_token")
    built = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=generate_merges(vocab, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces = [normalizers.Replace(" ", _SPACE)]
    built.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), *spaces] if prefix else spaces)
    parts = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    built.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if prefix else parts)
    return built
