"""A batch for a training step: random tokens in documents of some mean length, packed or not."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from train.data.packing import pack

# Of the logarithm of a document's length: one in forty is a quarter of the mean, one in forty three times it.
DEVIATION = 0.7
#: The part of a document that is its prompt, and not learnt.
PROMPT = 4


class TrainingBatch(NamedTuple):
    """A batch, and the documents in it.

    Attributes:
        arrays: What the loss takes.
        lengths: Tokens of its documents.
    """

    arrays: dict[str, np.ndarray]
    lengths: Int[np.ndarray, "n"]

    @property
    def real(self) -> int:
        """Tokens of the documents, without padding."""
        return int(self.lengths.sum())

    @property
    def span(self) -> int:
        """Tokens of the document that a real token lies in, on average."""
        return round(float((self.lengths**2).sum()) / self.real)


def make_batch(
    batch: int, window: int, vocab_size: int, *, document_tokens: int | None, packing: bool
) -> TrainingBatch:
    """The same batch again for the same arguments.

    Args:
        batch: Windows.
        window: Tokens of a window.
        vocab_size: Tokens are below it.
        document_tokens: Mean length of documents, log-normally distributed and at most a window; a quarter of
            each is its prompt. None: each is a window, and all of it is learnt.
        packing: Whether documents share windows, as a recipe's ``packing`` does.

    Raises:
        ValueError: The documents are shorter than 2 tokens or longer than a window.
    """
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, vocab_size, (batch, window), np.int32)
    if document_tokens is None:
        lengths, prompt = np.full(batch, window), 0
    else:
        if not 2 <= document_tokens <= window:
            raise ValueError(f"documents must have 2..{window} tokens on average, not {document_tokens}")
        # More than a batch needs, so that packed windows are as full as those of a whole set.
        drawn = rng.lognormal(np.log(document_tokens) - DEVIATION**2 / 2, DEVIATION, 4096)
        lengths, prompt = drawn.round().astype(np.int64).clip(2, window), PROMPT
    if packing:
        packed = pack(lengths, window, 0)
        windows = np.split(lengths[packed.pieces], packed.first[1:-1])
    else:
        windows = list(lengths[:, None])
    # An average number of documents, then of tokens: a batch of two has to stand for a whole set.
    documents, real = np.array([[len(one), one.sum()] for one in windows]).T
    order = np.lexsort((np.abs(real - real.mean()), np.abs(documents - documents.mean())))
    windows = [windows[i] for i in order[:batch]]
    learn, starts = np.zeros((batch, window), bool), np.zeros((batch, window), np.int32)
    for row, own in enumerate(windows):
        end = 0
        for length in own.tolist():
            learn[row, end + (length // prompt if prompt else 0) : end + length] = True
            starts[row, end:] = end
            end += length
        starts[row, end:] = end
        tokens[row, end:] = 0
    arrays = {"tokens": tokens, "learn": learn, "real": np.array([own.sum() for own in windows], np.int32)}
    return TrainingBatch(arrays | ({"starts": starts} if packing else {}), np.concatenate(windows))
