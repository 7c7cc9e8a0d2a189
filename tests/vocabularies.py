"""Tiny tokenizers that split characters: token b + 1 is byte b in all of them."""

import functools

import tokenizers
import transformers
from tokenizers import decoders, models

EOS = 0
#: Tokens of the byte-level one: "b" with the first byte of a character, and another's other two with "c".
HIGH, LATE = 257, 258


def _made(backend):
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@functools.cache
def byte_level():
    """Byte-level BPE without merges, as in most current models."""
    # The printable stand-ins for bytes, in the order of the bytes.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {b: chr(b) for b in printable}
    stand_ins |= {b: chr(256 + i) for i, b in enumerate(sorted(set(range(256)) - set(printable)))}
    parts = [b"<eos>", *(bytes([b]) for b in range(256)), b"b" + "日".encode()[:1], "日".encode()[1:] + b"c"]
    words = ["".join(stand_ins[b] for b in part) for part in parts]
    backend = tokenizers.Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return _made(backend)


@functools.cache
def byte_fallback(strip=False):
    """Tokens for bytes beside others, decoded as Gemma's, or as Llama 2's where it strips a first space."""
    words = [
        "<eos>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁the",
        "é",
        "▁",
        "a▁",
        "\N{REPLACEMENT CHARACTER}",
        "▁=",
        "▁1",
        "▁▁▁▁",
        "x",
    ]
    backend = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return _made(backend)
