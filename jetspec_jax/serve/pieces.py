"""A text that arrives in pieces and is read once, but for parts that are read again."""


class Pieces:
    """The unread end of a text, and all of it since a mark.

    Taking a piece costs time in proportion to the piece and the unread text, not to the text since the mark.

    Attributes:
        text: The last piece, after what was unread before it.
        place: Up to where `text` has been read.
    """

    def __init__(self) -> None:
        """Begins before the first piece."""
        self.text, self.place = "", 0
        # The mark is in `text` where this is no None; what follows it in earlier pieces is here.
        self._mark: int | None = None
        self._kept: list[str] = []
        self._length = 0

    def feed(self, piece: str) -> None:
        """Takes a piece."""
        if self._mark is not None:
            self._kept.append(self.text[self._mark : self.place])
            self._length += self.place - self._mark
            self._mark = 0
        self.text, self.place = self.text[self.place :] + piece, 0

    def read(self, end: int) -> str:
        """The text up to a place, which has been read now."""
        begin, self.place = self.place, end
        return self.text[begin:end]

    def mark(self) -> None:
        """Keeps the text from here on."""
        self._mark, self._kept, self._length = self.place, [], 0

    def since_mark(self, place: int) -> int:
        """Characters from the mark to a place in `text`."""
        assert self._mark is not None
        return self._length + place - self._mark

    def marked(self, length: int | None = None) -> str:
        """The text from the mark on: so many characters, or up to what has been read."""
        self._join()
        assert self._mark is not None
        return self.text[self._mark : self.place if length is None else self._mark + length]

    def rewind(self, length: int) -> None:
        """Goes on so many characters after the mark, and forgets the mark."""
        self._join()
        assert self._mark is not None
        self.place, self._mark = self._mark + length, None

    def _join(self) -> None:
        """Has all since the mark in `text`."""
        if self._kept:
            assert self._mark == 0
            kept = "".join(self._kept)
            self.text, self.place = kept + self.text, self.place + len(kept)
            self._kept, self._length = [], 0
