"""Windows of documents, with one document each or packed. Shapes: B windows of T tokens."""

from typing import NamedTuple, NotRequired, TypedDict

import numpy as np
from jaxtyping import Bool, Int, Int32, Shaped

from train.data.documents import Documents
from train.data.packing import pack


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
    """Counts of an epoch's windows.

    Attributes:
        windows: Number of windows.
        window: Tokens of each.
        documents: Documents in them.
        unlearnable: Omitted documents without a token to learn.
        tokens: Real tokens in them.
        cut: Documents that are longer than a window.
    """

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
    """Documents cut into consecutive windows of one length, as a source for grain.

    A document of 10 tokens in windows of 4; the last is padded::

        a b c d | e f g h | i j . .

    A window's first token cannot be predicted in it, so a window without a token to learn after its first is
    omitted.

    Attributes:
        documents: The documents.
        window: Tokens of a window.
    """

    def __init__(self, documents: Documents, window: int):
        """Makes the index from the lengths and spans of the documents.

        Raises:
            ValueError: The window is shorter than 2, or there are no documents or none with tokens to learn.
        """
        self.documents, self.window = documents, window
        self._document, self._start = learnable_pieces(documents, window)

    def __len__(self) -> int:
        return len(self._document)

    def __getitem__(self, index: int) -> Window:
        """A window by its index.

        Raises:
            IndexError: There is none.
            ValueError: Its shard is damaged.
        """
        _check_index(self, index)
        document, start = self.documents[int(self._document[index])], int(self._start[index])
        tokens, learn = np.zeros(self.window, np.int32), np.zeros(self.window, bool)
        part = slice(start, start + self.window)
        count = min(len(document.tokens) - start, self.window)
        tokens[:count], learn[:count] = document.tokens[part], document.learn[part]
        return {"tokens": tokens, "learn": learn, "real": np.array(count, np.int32)}

    @property
    def contents(self) -> Contents:
        """What the windows hold."""
        lengths = piece_lengths(self.documents, self._document, self._start, self.window)
        return _contents(self, self._document, int(lengths.sum()))


class PackedWindows:
    """Packed windows, as a source for grain; only documents longer than a window are cut.

    The pieces are the windows of `Windows` without padding. Each has a token to learn, and its positions
    begin at 0. Documents of 3, 2 and 6 tokens in windows of 8, and their ``starts``::

        c c c c c c b b | a a a . . . . .
        0 0 0 0 0 0 6 6 | 0 0 0 3 3 3 3 3

    Attributes:
        documents: The documents.
        window: Tokens of a window.
    """

    def __init__(self, documents: Documents, window: int, seed: int):
        """Plans the windows; the plan depends only on documents, window and seed.

        Raises:
            ValueError: As for `Windows`.
        """
        self.documents, self.window = documents, window
        self._document, self._start = learnable_pieces(documents, window)
        self._length = piece_lengths(documents, self._document, self._start, window)
        self._packed = pack(self._length, window, seed)

    def __len__(self) -> int:
        return len(self._packed.first) - 1

    def __getitem__(self, index: int) -> Window:
        """A window by its index.

        Raises:
            IndexError: There is none.
            ValueError: A shard is damaged.
        """
        _check_index(self, index)
        tokens, learn = np.zeros(self.window, np.int32), np.zeros(self.window, bool)
        starts, end = np.zeros(self.window, np.int32), 0
        for piece in self._packed.pieces[self._packed.first[index] : self._packed.first[index + 1]]:
            document, first = self.documents[int(self._document[piece])], int(self._start[piece])
            begin, end = end, end + int(self._length[piece])
            part = slice(first, first + end - begin)
            tokens[begin:end], learn[begin:end] = document.tokens[part], document.learn[part]
            starts[begin:end] = begin
        starts[end:] = end
        return {"tokens": tokens, "learn": learn, "real": np.array(end, np.int32), "starts": starts}

    @property
    def contents(self) -> Contents:
        """What the windows hold."""
        return _contents(self, self._document, int(self._length.sum()))


def make_windows(documents: Documents, window: int, seed: int, *, packing: bool) -> Windows | PackedWindows:
    """The windows of an epoch, packed or not.

    Raises:
        ValueError: As for `Windows`.
    """
    return PackedWindows(documents, window, seed) if packing else Windows(documents, window)


def learnable_pieces(documents: Documents, window: int) -> tuple[Int[np.ndarray, "n"], Int[np.ndarray, "n"]]:
    """As `index_windows`.

    Raises:
        ValueError: The window is shorter than 2, or there are no documents or none with tokens to learn.
    """
    if window < 2:
        raise ValueError(f"a window must have at least 2 tokens, not {window}")
    if not len(documents):
        raise ValueError(f"{documents.folder} holds no {documents.split} documents")
    document, start = index_windows(documents.lengths, documents.spans, window)
    if not len(document):
        raise ValueError(
            f"{documents.folder}: no window of {window} tokens of its {documents.split} documents has a "
            "token to be learnt after its first"
        )
    return document, start


def piece_lengths(
    documents: Documents, document: Int[np.ndarray, "n"], start: Int[np.ndarray, "n"], window: int
) -> Int[np.ndarray, "n"]:
    """Tokens of the pieces of `learnable_pieces`."""
    return np.minimum(documents.lengths[document] - start, window)


def _contents(windows: Windows | PackedWindows, document: Int[np.ndarray, "n"], tokens: int) -> Contents:
    kept, lengths = np.unique(document), windows.documents.lengths
    cut = int((lengths[kept] > windows.window).sum())
    return Contents(len(windows), windows.window, len(kept), len(lengths) - len(kept), tokens, cut)


def _check_index(windows: Windows | PackedWindows, index: int) -> None:
    if not 0 <= index < len(windows):
        raise IndexError(f"there are {len(windows)} windows, asked for {index}")


def index_windows(
    lengths: Int[np.ndarray, "n"], spans: Int[np.ndarray, "m 3"], window: int
) -> tuple[Int[np.ndarray, "w"], Int[np.ndarray, "w"]]:
    """The windows with a token to learn: their documents, and their first tokens in these."""
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


def check_enough(windows: Windows | PackedWindows, batch: int) -> None:
    """Raises ValueError if there are fewer packed windows than a batch of all processes."""
    if isinstance(windows, PackedWindows) and len(windows) < batch:
        raise ValueError(
            f"packing leaves {len(windows)} windows of {windows.window} tokens, fewer than a batch of "
            f"{batch}; set fit.batch to at most {len(windows)}, a shorter window, or packing to false"
        )
