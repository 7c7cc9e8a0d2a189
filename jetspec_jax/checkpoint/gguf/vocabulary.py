"""The tokens of a GGUF file, their types, and the tokens that end a text or a turn.

The metadata name one end, while publishers list several in ``generation_config.json``, and converters declare
wrong types. As in llama.cpp, the text of a token decides.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jetspec_jax.arguments import shown
from jetspec_jax.checkpoint.gguf.header import Header
from jetspec_jax.config.fields import is_int

#: The prefix of the vocabulary's metadata keys.
KEYS = "tokenizer.ggml."
MAX_TOKEN_BYTES = 2**14
#: llama.cpp's numbers of token types.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4

# Ends of texts and turns, whatever their declared type.
_ENDS = frozenset(
    (
        *("<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>"),
        *("<|end|>", "<|end_of_turn|>", "<|EOT|>", "<end_of_utterance>", "<｜end▁of▁sentence｜>"),
    )
)
# Ends if they are control tokens. Some vocabularies have them as text, such as </s> of HTML in Qwen's.
_CONTROL_ENDS = frozenset({"</s>", "<eos>", "<EOT>"})
# Ends in GPT-OSS's format, whose vocabulary has both. There, <|end|> ends a message and not a turn.
_HARMONY_ENDS, _END_OF_MESSAGE = frozenset({"<|return|>", "<|call|>"}), "<|end|>"
# Other tokens of chat templates. Declared as text, they would be cut into pieces in every prompt.
_TEMPLATES = frozenset(
    (
        *("<|im_start|>", "<|im_sep|>", "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>"),
        *("<|system|>", "<|user|>", "<|assistant|>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
    )
)


class Vocabulary(NamedTuple):
    """The tokens of a file.

    ``ends`` are tokens that the metadata name, then tokens with the text of an end. Types are as after wrong
    ones (``retyped``) have become that of control tokens.
    """

    tokens: list[str]
    types: list[int]
    ends: list[int]
    retyped: list[int]


def read_vocabulary(header: Header) -> Vocabulary:
    """Reads the tokens of a file; without a tokenizer there are none."""
    metadata = header.metadata
    tokens = listed(metadata, "tokens", str, None if has_tokenizer(metadata) else [])
    types = listed(metadata, "token_type", int, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"{KEYS}tokens has {len(tokens)} tokens, another length than {KEYS}token_type")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ValueError(
            f"{KEYS}tokens has {len(tokens)} tokens, more than the {embedding.shape[0]} rows of "
            "token_embd.weight"
        )
    for number, token in enumerate(tokens):
        if 4 * len(token) > MAX_TOKEN_BYTES and (size := len(token.encode())) > MAX_TOKEN_BYTES:
            raise ValueError(f"token {number} has {size:,} bytes; a token may have {MAX_TOKEN_BYTES:,}")
    texts = (_ENDS | _HARMONY_ENDS) - {_END_OF_MESSAGE} if _HARMONY_ENDS.issubset(tokens) else _ENDS
    named = (token_id(metadata, f"{name}_token_id") for name in ("eos", "eot", "eom"))
    ends, retyped = [number for number in named if number is not None], []
    for number, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        is_end = token in texts
        if is_end or (token in _CONTROL_ENDS and kind == CONTROL):
            ends.append(number)
        is_text = kind not in (CONTROL, USER_DEFINED)
        if (is_end and kind != CONTROL) or (is_text and token in _TEMPLATES):
            retyped.append(number)
            types[number] = CONTROL
    return Vocabulary(tokens, types, list(dict.fromkeys(ends)), retyped)


def special_ids(header: Header) -> dict[str, Any]:
    """The ids of special tokens, with the keys of a ``config.json``; all ends of texts are listed."""
    return {
        "bos_token_id": token_id(header.metadata, "bos_token_id"),
        "eos_token_id": read_vocabulary(header).ends or None,
        "pad_token_id": token_id(header.metadata, "padding_token_id"),
    }


def has_tokenizer(metadata: Mapping[str, Any]) -> bool:
    """Whether a file has a tokenizer, of any kind."""
    return metadata.get(f"{KEYS}model", "none") not in ("none", "no_vocab")


def token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """A token id of the metadata; None if it is absent."""
    value = metadata.get(KEYS + name)
    if value is not None and (not is_int(value) or value < 0):
        raise ValueError(f"{KEYS}{name} must be a token id, not {shown(value)}")
    return value


def listed(metadata: Mapping[str, Any], name: str, kind: type, default: list[Any] | None = None) -> list[Any]:
    """A new list of values of one type from the metadata."""
    values = metadata.get(KEYS + name, default)
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values[:1]):
        raise ValueError(f"{KEYS}{name} must be a list of {kind.__name__}, not {shown(values)}")
    return list(values)
