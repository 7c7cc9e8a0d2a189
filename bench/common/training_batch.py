"""A batch for a training step: random tokens in documents of a given mean length, packed or not."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from train.data.packing import pack

# Standard deviation of the logarithm of a document's length: one document in forty is shorter than a quarter
# of the mean, and one in forty is longer than three times the mean.
DEVIATION = 0.7
#: A quarter of a document is its prompt, which has no loss.
PROMPT = 4


class TrainingBatch(NamedTuple):
    """A batch and its documents.

    Attributes:
        arrays: The arguments of the loss.
        lengths: Tokens of each document.
    """

    arrays: dict[str, np.ndarray]
    lengths: Int[np.ndarray, "n"]

    @property
    def real(self) -> int:
        """Tokens of all documents, without padding."""
        return int(self.lengths.sum())

    @property
    def span(self) -> int:
        """The mean, over real tokens, of the length of the token's document."""
        return round(float((self.lengths**2).sum()) / self.real)


def make_batch(
    batch: int, window: int, vocab_size: int, *, document_tokens: int | None, packing: bool
) -> TrainingBatch:
    """Makes a batch; the same arguments give the same batch.

    Args:
        batch: Number of windows.
        window: Tokens per window.
        document_tokens: Mean length of documents, log-normally distributed and at most a window; a quarter of
            each is its prompt. With None each document is a window without a prompt.
        packing: Whether documents share windows, like a recipe's ``packing``.

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
        # More documents than a batch holds, so that packed windows are as full as those of a large data set.
        count = max(4096, 2 * batch * (window // document_tokens if packing else 1))
        drawn = rng.lognormal(np.log(document_tokens) - DEVIATION**2 / 2, DEVIATION, count)
        lengths, prompt = drawn.round().astype(np.int64).clip(2, window), PROMPT
    if packing:
        packed = pack(lengths, window, 0)
        windows = np.split(lengths[packed.pieces], packed.first[1:-1])
    else:
        windows = list(lengths[:, None])
    # The windows nearest to the mean number of documents, then of tokens: few windows represent the set.
    counts, sums = np.array([[len(documents), documents.sum()] for documents in windows]).T
    order = np.lexsort((np.abs(sums - sums.mean()), np.abs(counts - counts.mean())))
    windows = [windows[i] for i in order[:batch]]
    learn, starts = np.zeros((batch, window), bool), np.zeros((batch, window), np.int32)
    for row, documents in enumerate(windows):
        end = 0
        for length in documents.tolist():
            learn[row, end + (length // prompt if prompt else 0) : end + length] = True
            starts[row, end:] = end
            end += length
        starts[row, end:] = end
        tokens[row, end:] = 0
    real = np.array([documents.sum() for documents in windows], np.int32)
    arrays = {"tokens": tokens, "learn": learn, "real": real}
    return TrainingBatch(arrays | ({"starts": starts} if packing else {}), np.concatenate(windows))
