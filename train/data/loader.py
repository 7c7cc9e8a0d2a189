"""Batches of windows of documents, shuffled again in every epoch. Shapes: B windows of T tokens."""

from typing import TypedDict

import grain
import numpy as np
from jaxtyping import Bool, Int, Int32

from train.data.documents import Documents

# Threads that read whole batches, and how many batches they read ahead.
THREADS, AHEAD = 4, 8


class Window(TypedDict):
    """A window, or with a leading axis a batch of them.

    Attributes:
        tokens: Token ids; 0 after a document's end.
        learn: Which of them are to be learnt; none after a document's end.
    """

    tokens: Int32[np.ndarray, "*B T"]
    learn: Bool[np.ndarray, "*B T"]


class Windows:
    """Documents cut into consecutive windows of one length, as a source for grain.

    A document of 10 tokens in windows of 4; the last is padded::

        a b c d | e f g h | i j . .

    A window's first token cannot be predicted in it, so a window with no token to be learnt after its first
    is left out.

    Attributes:
        documents: The documents.
        window: Tokens of a window.
    """

    def __init__(self, documents: Documents, window: int):
        """Makes the index from the lengths and spans of the documents.

        Raises:
            ValueError: The window is shorter than 2, or there are no documents or none with tokens to learn.
        """
        if window < 2:
            raise ValueError(f"a window must have at least 2 tokens, not {window}")
        if not len(documents):
            raise ValueError(f"{documents.folder} holds no {documents.split} documents")
        self.documents, self.window = documents, window
        self._document, self._start = index_windows(documents.lengths, documents.spans, window)
        if not len(self._document):
            raise ValueError(
                f"{documents.folder}: no window of {window} tokens of its {documents.split} documents has a "
                "token to be learnt after its first"
            )

    def __len__(self) -> int:
        """How many windows there are."""
        return len(self._document)

    def __getitem__(self, index: int) -> Window:
        """A window by its index.

        Raises:
            IndexError: There is none.
            ValueError: Its shard is damaged.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"there are {len(self)} windows, asked for {index}")
        document, start = self.documents[int(self._document[index])], int(self._start[index])
        tokens, learn = np.zeros(self.window, np.int32), np.zeros(self.window, bool)
        part = slice(start, start + self.window)
        count = min(len(document.tokens) - start, self.window)
        tokens[:count], learn[:count] = document.tokens[part], document.learn[part]
        return {"tokens": tokens, "learn": learn}


def index_windows(
    lengths: Int[np.ndarray, "n"], spans: Int[np.ndarray, "m 3"], window: int
) -> tuple[Int[np.ndarray, "w"], Int[np.ndarray, "w"]]:
    """The windows that have something to learn: their documents, and their first tokens in those."""
    counts = -(-lengths // window)
    first = np.cumsum(counts) - counts
    document, start, stop = spans.T
    # A span reaches into the windows from that of its first token to that of its last.
    reach = (stop - 1) // window - start // window + 1
    nth = np.arange(reach.sum()) - np.repeat(np.cumsum(reach) - reach, reach)
    number = np.repeat(start // window, reach) + nth
    # The part of the span in the window, without the window's first token.
    begin = np.maximum(np.repeat(start, reach), number * window + 1)
    end = np.minimum(np.repeat(stop, reach), (number + 1) * window)
    useful = np.zeros(int(counts.sum()), bool)
    useful[(np.repeat(first[document], reach) + number)[begin < end]] = True
    owner = np.repeat(np.arange(len(lengths)), counts)
    place = (np.arange(len(useful)) - np.repeat(first, counts)) * window
    return owner[useful], place[useful]


def batches(
    documents: Documents,
    window: int,
    batch: int,
    seed: int,
    *,
    process_index: int = 0,
    process_count: int = 1,
) -> "grain.DatasetIterator[Window]":
    """Endless batches. An epoch uses every window once, in an order that depends on the seed alone.

    The windows of all epochs form one sequence, cut into global batches. A process takes its own rows of
    each, so the stacked parts of all processes are the batch of a single process. ``get_state()`` gives the
    position, which fits into JSON, and ``set_state()`` restores it. ``close()`` ends the reading threads.

    Args:
        documents: The documents.
        window: Tokens of a window.
        batch: Windows per batch of this process.
        seed: Seed of the order.
        process_index: The index of this process.
        process_count: How many processes read.

    Raises:
        ValueError: As for `Windows`, or a setting is out of its range.
    """
    if batch < 1:
        raise ValueError(f"a batch must have at least 1 window, not {batch}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"the seed of the order must lie in 0..2**32 - 1, not {seed}")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process {process_index} is none of {process_count}: 0..{process_count - 1} are")
    windows = Windows(documents, window)
    mine = slice(process_index * batch, (process_index + 1) * batch)

    def read(indices: Int[np.ndarray, "G"]) -> Window:
        rows = [windows[int(index)] for index in indices[mine]]
        return {
            "tokens": np.stack([row["tokens"] for row in rows]),
            "learn": np.stack([row["learn"] for row in rows]),
        }

    # Indices are shuffled and batched before windows are read, so a process reads only its own rows.
    order = grain.MapDataset.range(len(windows)).shuffle(seed=seed).repeat()
    # The sequence is endless, so there is no remainder.
    dataset = order.batch(batch * process_count, drop_remainder=True).map(read)
    return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)))
