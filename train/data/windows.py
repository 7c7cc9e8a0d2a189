"""Windows of documents, with one document each or packed. Shapes: B windows of T tokens."""

from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
from jaxtyping import Bool, Int, Int32, Shaped

from train.data.documents import Documents
from train.data.packing import Packed, pack


class Window(TypedDict):
    """A window, or with a leading axis a batch of windows.

    Attributes:
        tokens: Token ids; 0 in the padding.
        learn: Whether to learn each token; false in the padding.
        real: The number of tokens before the padding.
        starts: In packed windows, for each token the index of its document's first token. The padding counts
            as a document.
        states: With cached target states, the target's last hidden states and its taps, concatenated.
    """

    tokens: Int32[np.ndarray, "*B T"]
    learn: Bool[np.ndarray, "*B T"]
    real: Int32[np.ndarray, "*B"]
    starts: NotRequired[Int32[np.ndarray, "*B T"]]
    states: NotRequired[Shaped[np.ndarray, "*B T X"]]


class Contents(NamedTuple):
    """Counts of an epoch's windows; ``documents`` are those with a token to learn, ``tokens`` real ones."""

    windows: int
    window: int
    documents: int
    unlearnable: int
    tokens: int
    cut: int

    def __str__(self) -> str:
        fill = self.tokens / (self.windows * self.window)
        left_out = f"; {self.unlearnable:,} with nothing to learn are left out" if self.unlearnable else ""
        cut = f"; {self.cut:,} documents are longer than a window and cut" if self.cut else ""
        return (
            f"{self.documents:,} documents in {self.windows:,} windows of {self.window:,} tokens, of which "
            f"{fill:.1%} are real{cut}{left_out}"
        )


class Windows:
    """Documents in windows of one length, as a source for grain.

    A document is cut into consecutive pieces of at most a window. A window's first token cannot be predicted
    in it, so a piece without a token to learn after its first is omitted. Each window has one piece. A
    document of 10 tokens in windows of 4; the last is padded::

        a b c d | e f g h | i j . .

    With a seed windows are packed: each has several pieces, whose positions begin at 0. Documents of 3, 2 and
    6 tokens in windows of 8, and their ``starts``::

        c c c c c c b b | a a a . . . . .
        0 0 0 0 0 0 6 6 | 0 0 0 3 3 3 3 3

    Attributes:
        seed: The seed of the plan of packed windows, or None. The plan depends on nothing else but the
            documents and the window.
    """

    def __init__(self, documents: Documents, window: int, seed: int | None = None):
        """Plans the windows from the lengths and spans of the documents.

        Raises:
            ValueError: The window is shorter than 2, or there are no documents or none with tokens to learn.
        """
        if window < 2:
            raise ValueError(f"a window must have at least 2 tokens, not {window}")
        if not len(documents):
            raise ValueError(f"{documents.folder} holds no {documents.split} documents")
        self.documents, self.window, self.seed = documents, window, seed
        self._document, self._start = index_windows(documents.lengths, documents.spans, window)
        count = len(self._document)
        if not count:
            raise ValueError(
                f"{documents.folder}: no window of {window} tokens of its {documents.split} documents has a "
                "token to be learnt after its first"
            )
        self._length = np.minimum(documents.lengths[self._document] - self._start, window)
        alone = Packed(np.arange(count), np.arange(count + 1))
        self._packed = alone if seed is None else pack(self._length, window, seed)

    def __len__(self) -> int:
        return len(self._packed.first) - 1

    def __getitem__(self, index: int) -> Window:
        """A window by its index.

        Raises:
            ValueError: A shard is damaged.
        """
        tokens, learn = np.zeros(self.window, np.int32), np.zeros(self.window, bool)
        starts, end = np.zeros(self.window, np.int32), 0
        for piece in self._packed.pieces[self._packed.first[index] : self._packed.first[index + 1]]:
            document, first = self.documents[int(self._document[piece])], int(self._start[piece])
            begin, end = end, end + int(self._length[piece])
            part = slice(first, first + end - begin)
            tokens[begin:end], learn[begin:end] = document.tokens[part], document.learn[part]
            starts[begin:end] = begin
        starts[end:] = end
        window: Window = {"tokens": tokens, "learn": learn, "real": np.array(end, np.int32)}
        return window if self.seed is None else {**window, "starts": starts}

    @property
    def contents(self) -> Contents:
        """What the windows hold."""
        kept, lengths = np.unique(self._document), self.documents.lengths
        cut, omitted = int((lengths[kept] > self.window).sum()), len(lengths) - len(kept)
        return Contents(len(self), self.window, len(kept), omitted, int(self._length.sum()), cut)


def index_windows(
    lengths: Int[np.ndarray, "n"], spans: Int[np.ndarray, "m 3"], window: int
) -> tuple[Int[np.ndarray, "w"], Int[np.ndarray, "w"]]:
    """The pieces with a token to learn: their documents, and their first tokens in these."""
    counts = -(-lengths // window)
    first = np.cumsum(counts) - counts
    document, start, stop = spans.T
    # A span covers the windows from that of its first token to that of its last.
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


def check_enough(windows: Windows, batch: int) -> None:
    """Raises ValueError if there are fewer packed windows than a batch of all processes."""
    if windows.seed is not None and len(windows) < batch:
        raise ValueError(
            f"packing leaves {len(windows)} windows of {windows.window} tokens, fewer than a batch of "
            f"{batch}; set fit.batch to at most {len(windows)}, a shorter window, or packing to false"
        )
