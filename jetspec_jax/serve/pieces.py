"""A buffer for a text that arrives in pieces and is read once, with rewinding to a mark."""


class Pieces:
    """The unread end of a text, and the text since a mark.

    `feed` takes time proportional to the piece and the unread text, not to the text since the mark.

    `text` is the unread text at the last `feed`, followed by its piece.
    """

    def __init__(self) -> None:
        self.text, self.place = "", 0
        # The position of the mark in `text`, or None; `_kept` has marked text from before `text`.
        self._mark: int | None = None
        self._kept: list[str] = []
        self._length = 0

    def feed(self, piece: str) -> None:
        """Appends a piece."""
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.place])
            self._length += self.place - self._mark
            self._mark = 0
        self.text, self.place = self.text[self.place :] + piece, 0

    def read(self, end: int) -> str:
        """Reads the text up to a position."""
        begin, self.place = self.place, end
        return self.text[begin:end]

    def mark(self) -> None:
        """Sets the mark at the read position."""
        self._mark, self._kept, self._length = self.place, [], 0

    def since_mark(self, place: int) -> int:
        """The number of characters from the mark to a position in `text`."""
        assert self._mark is not None
        return self._length + place - self._mark

    def marked(self, length: int | None = None) -> str:
        """The text from the mark on: ``length`` characters, or up to the read position."""
        self._join()
        assert self._mark is not None
        return self.text[self._mark : self.place if length is None else self._mark + length]

    def rewind(self, length: int) -> None:
        """Sets the read position ``length`` characters after the mark, and removes the mark."""
        self._join()
        assert self._mark is not None
        self.place, self._mark = self._mark + length, None

    def _join(self) -> None:
        """Moves all marked text into `text`."""
        if self._kept:
            assert self._mark == 0
            kept = "".join(self._kept)
            self.text, self.place = kept + self.text, self.place + len(kept)
            self._kept, self._length = [], 0
