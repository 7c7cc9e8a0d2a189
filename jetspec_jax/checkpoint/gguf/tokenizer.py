"""Builds the tokenizer and the chat template from a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from jetspec_jax.checkpoint.gguf.header import Header
from jetspec_jax.checkpoint.library import import_transformers
from jetspec_jax.config.fields import is_int

_KEYS = "tokenizer.ggml."
#: Advice if the tokenizer cannot be built.
WAY_OUT = "give a tokenizer's folder instead (tokenizer=, on the command line --tokenizer)"

# llama.cpp's numbers of token types.
_CONTROL, _USER_DEFINED = 3, 4
# Tokens that end a turn of a chat. The metadata of older files has another end token, or none.
_ENDS_OF_TURNS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
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


def special_ids(header: Header) -> dict[str, Any]:
    """The ids of special tokens, with the keys of a ``config.json``; all ends of a text or turn are listed.

    Raises:
        ValueError: A value is not a token id.
    """
    metadata = header.metadata
    tokens = _list(metadata, "tokens", str, [])
    types = _list(metadata, "token_type", int, [_CONTROL] * len(tokens))
    names = ("eos", "eot", "eom")
    ends = [token_id for name in names if (token_id := _id(metadata, f"{name}_token_id")) is not None]
    ends += [
        number
        for number, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if token in _ENDS_OF_TURNS and kind == _CONTROL
    ]
    return {
        "bos_token_id": _id(metadata, "bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
        "pad_token_id": _id(metadata, "padding_token_id"),
    }


def read_tokenizer(header: Header) -> Any:
    """The transformers tokenizer of a file; None if it has none.

    Raises:
        ValueError: The tokenizer's kind or pre-tokenisation is not supported, or its metadata are
            inconsistent.
    """
    metadata = header.metadata
    kind = metadata.get(f"{_KEYS}model", "none")
    if kind in ("none", "no_vocab"):
        return None
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, [1] * len(tokens))
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(f"{_KEYS}tokens holds a token twice, or has another length than {_KEYS}token_type")
    if kind == "gpt2":
        built, add_bos = _byte_level(metadata, tokens)
    elif kind == "llama":
        built, add_bos = _sentence_piece(metadata, tokens), True
    else:
        raise ValueError(
            f"tokenizer of kind {kind!r} ({_KEYS}model) is not supported; supported: gpt2, llama; {WAY_OUT}"
        )
    added = [
        (token, token_type == _CONTROL)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (_CONTROL, _USER_DEFINED)
    ]
    built.add_tokens([AddedToken(token, normalized=False, special=special) for token, special in added])
    if (count := built.get_vocab_size()) != len(tokens):
        raise ValueError(f"{_KEYS}tokens are {len(tokens)}, and they make a tokenizer of {count}")
    template = metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError(f"tokenizer.chat_template must be a string, not {type(template).__name__}")
    return import_transformers().PreTrainedTokenizerFast(
        tokenizer_object=built,
        **_special_tokens(metadata, tokens),
        add_bos_token=metadata.get(f"{_KEYS}add_bos_token", add_bos),
        add_eos_token=metadata.get(f"{_KEYS}add_eos_token", False),
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def _special_tokens(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, str]:
    """The special tokens, by transformers' names.

    Raises:
        ValueError: An id lies outside the vocabulary.
    """
    found = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _id(metadata, f"{key}_token_id")
        if token is None:
            continue
        if token >= len(tokens):
            raise ValueError(f"{_KEYS}{key}_token_id {token} lies outside the vocabulary of {len(tokens)}")
        found[f"{name}_token"] = tokens[token]
    return found


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> tuple[tokenizers.Tokenizer, bool]:
    """A byte-level BPE tokenizer as in GPT-2, and whether texts begin with the BOS token."""
    name = metadata.get(f"{_KEYS}pre")
    if not isinstance(name, str) or name not in SPLITS:
        raise ValueError(
            f"{_KEYS}pre is {name!r}, so text would be cut in an unknown way; "
            f"supported: {', '.join(SPLITS)}; "
            f"{WAY_OUT}"
        )
    split, vocab = SPLITS[name], {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]
    if wrong := [
        pair for pair in merges if len(pair) != 2 or not all(part in vocab for part in (*pair, "".join(pair)))
    ]:
        raise ValueError(
            f"{_KEYS}merges holds {len(wrong)} that join no two tokens to a third, such as {wrong[0]}"
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
    vocab = {token: number for number, token in enumerate(tokens)}
    prefix = metadata.get(f"{_KEYS}add_space_prefix", True)
    if metadata.get("general.architecture") == "gemma3":
        # Gemma's scores do not give the order of merges; the token ids do.
        scores = {token: -float(number) for token, number in vocab.items()}
    else:
        given = _list(metadata, "scores", float)
        if len(given) != len(tokens):
            raise ValueError(f"{_KEYS}scores are {len(given)}, and there are {len(tokens)} tokens")
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


def _id(metadata: Mapping[str, Any], name: str) -> int | None:
    """A token id of the metadata; None if it is absent."""
    value = metadata.get(_KEYS + name)
    if value is not None and (not is_int(value) or value < 0):
        raise ValueError(f"{_KEYS}{name} must be a token id, not {value!r}")
    return value


def _list(metadata: Mapping[str, Any], name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    """A list of values of one type from the metadata."""
    values = metadata.get(_KEYS + name, default)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values[:1]):
        raise ValueError(f"{_KEYS}{name} must be a list of {kind.__name__}, not {type(values).__name__}")
    return values
