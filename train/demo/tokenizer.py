"""A byte-level BPE tokenizer for Python source, trained on the corpus.

Newlines and indentation are separate tokens, so text that is cut at a line has the same tokens as in its
document, and a prompt never ends in tokens that the model has not seen.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from jaxtyping import Int
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, MASK, TURN_START, TURN_END = "<|endoftext|>", "<|mask|>", "<|im_start|>", "<|im_end|>"
# In the order of their ids, at the beginning of the vocabulary.
SPECIAL = (END_OF_TEXT, MASK, TURN_START, TURN_END)

# Runs of newlines; indentation; words with underscores; up to three digits; punctuation; other blanks.
# Words, digits and punctuation may take one blank before them.
PIECES = r"\n+|(?<=\n)[ \t]+| ?[\p{L}_]+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+|\s"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Tokenizer:
    """Text to ids and back; special tokens in the text are plain text."""

    def __init__(self, inner: tokenizers.Tokenizer):
        """Wraps a tokenizer of the `tokenizers` library."""
        # Source that contains the text of a special token, as this file does, must not end a document.
        inner.encode_special_tokens = True
        self.inner = inner

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "Tokenizer":
        """Trains a vocabulary of exactly ``vocab_size`` entries, the special tokens included.

        Raises:
            ValueError: The text is too short for a vocabulary of that size.
        """
        inner = tokenizers.Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL),
            # All 256 bytes, so that any text can be encoded.
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        if inner.get_vocab_size() != vocab_size:
            raise ValueError(
                f"the corpus gives a vocabulary of {inner.get_vocab_size()} entries, not {vocab_size}"
            )
        return cls(inner)

    @classmethod
    def read(cls, folder: Path) -> "Tokenizer":
        """Reads ``tokenizer.json`` of a folder."""
        return cls(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")))

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of several texts."""
        return [encoding.ids for encoding in self.inner.encode_batch(list(texts), add_special_tokens=False)]

    def encode(self, text: str) -> list[int]:
        """Ids of one text."""
        return self.inner.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids, special tokens included."""
        return self.inner.decode(list(ids), skip_special_tokens=False)

    def id_of(self, token: str) -> int:
        """The id of a token by its name.

        Raises:
            KeyError: There is no such token.
        """
        found = self.inner.token_to_id(token)
        if found is None:
            raise KeyError(token)
        return found

    @property
    def vocab_size(self) -> int:
        """Number of entries, special tokens included."""
        return self.inner.get_vocab_size()

    def newline_ids(self) -> Int[np.ndarray, "n"]:
        """Ids of all runs of newlines."""
        newline = "Ċ"  # byte-level BPE writes a newline so
        return np.array(sorted(i for token, i in self.inner.get_vocab().items() if set(token) == {newline}))

    def files(self, *, max_length: int) -> dict[str, str]:
        """The tokenizer's files in Hugging Face layout, by name."""
        end = self.id_of(END_OF_TEXT)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": END_OF_TEXT,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "mask_token": MASK,
            "add_bos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_length,
            "chat_template": CHAT_TEMPLATE,
        }
        generation = {"eos_token_id": [end, self.id_of(TURN_END)], "pad_token_id": end}
        return {
            "tokenizer.json": self.inner.to_str(pretty=False),
            "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
            "generation_config.json": json.dumps(generation, indent=2) + "\n",
        }
