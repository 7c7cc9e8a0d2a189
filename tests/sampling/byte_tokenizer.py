"""A small tokenizer of bytes, some of them joined, with tokens that are no text."""

import tokenizers
import transformers
from tokenizers.pre_tokenizers import ByteLevel

#: Pieces of several bytes.
PIECES = ["ab", "abc", '{"', '":', '"}', "true", "12", ", ", "yes", "no", "  ", "é"]
#: Tokens that are no text: they come last.
SPECIAL = ["<end>", "<call>"]


def byte_tokenizer(without=""):
    """One token for each byte but those of some letters, then `PIECES` and parts of them, then `SPECIAL`."""
    alphabet = sorted(set(ByteLevel.alphabet()) - set(without))
    vocab, merges = {letter: number for number, letter in enumerate(alphabet)}, []
    split = ByteLevel(add_prefix_space=False, use_regex=False)
    for piece in PIECES:
        [(letters, _)] = split.pre_tokenize_str(piece)
        if set(letters) & set(without):
            continue
        for end in range(2, len(letters) + 1):
            if letters[:end] not in vocab:
                vocab[letters[:end]] = len(vocab)
                merges.append((letters[: end - 1], letters[end - 1]))
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
    backend.pre_tokenizer, backend.decoder = split, tokenizers.decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer
