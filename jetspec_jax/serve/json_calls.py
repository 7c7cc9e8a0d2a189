"""Parser of calls as JSON in tags: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``."""

import re

from jetspec_jax.serve.calls import Call, Spaced, call_of, held, read_value
from jetspec_jax.serve.pieces import Pieces
from jetspec_jax.serve.tag_reader import CLOSE, OPEN

# Significant characters: outside of strings all but words and numbers, and inside of strings.
_OUTSIDE, _INSIDE = re.compile(r"[^\s\w,:.+-]"), re.compile(r'["\\]')


class JsonCalls:
    """Finds calls as JSON objects in tags; everything else is text.

    An object ends at its last bracket, so its strings may contain tags, and the closing tag may be missing.
    The last bracket before a closing tag may also be missing. There may be several objects between two tags.

    The text of a broken object is searched for tags again. This takes linear time: an object breaks at a "<"
    outside of its strings, and of two objects that reach a later tag, one is outside of a string there. So
    each character is part of at most two broken objects.
    """

    def __init__(self) -> None:
        self._pieces, self._spaced = Pieces(), Spaced()
        self._object: _Object | None = None
        self._opened, self._closing = "", False

    def feed(self, text: str, *, last: bool = False, cut: bool = False) -> tuple[str, list[Call]]:
        """As `Finder.feed`."""
        pieces, shown, calls = self._pieces, [], []
        pieces.feed(text)
        more = True
        while more:
            if self._closing:
                more = self._close(last)
            elif self._object is None:
                more = self._search(shown, last)
            else:
                more = self._read(shown, calls, last)
        return "".join(shown), calls

    def _search(self, shown: list[str], last: bool) -> bool:
        """Emits text up to the next tag; returns False if there is none yet."""
        pieces = self._pieces
        place = pieces.text.find(OPEN, pieces.place)
        end = (
            place
            if place >= 0
            else len(pieces.text) - (0 if last else held(pieces.text[pieces.place :], OPEN))
        )
        shown.append(self._spaced.text(pieces.read(end)))
        if place >= 0:
            self._begin(OPEN)
        elif last:
            shown.append(self._spaced.end())
        return place >= 0

    def _begin(self, opened: str) -> None:
        """Starts reading an object after a tag."""
        self._pieces.mark()
        self._pieces.read(self._pieces.place + len(opened))
        self._object, self._opened = _Object(), opened

    def _read(self, shown: list[str], calls: list[Call], last: bool) -> bool:
        """Reads the object after a tag; returns False if its end has not arrived yet."""
        pieces, parser = self._pieces, self._object
        assert parser is not None
        pieces.place = parser.read(pieces.text, pieces.place)
        missing = ""
        if parser.depth == 1 and parser.broken:
            rest = pieces.text[pieces.place : pieces.place + len(CLOSE)]
            if rest != CLOSE and CLOSE.startswith(rest) and not last:
                return False
            missing = "}" if rest == CLOSE else ""
        if not (parser.broken or parser.whole or last):
            return False
        call = None
        if parser.whole or missing:
            value = read_value(pieces.marked()[len(self._opened) :] + missing)
            # If the last bracket is missing, the arguments may be missing too.
            given = isinstance(value, dict) and not value.keys().isdisjoint(("arguments", "parameters"))
            call = call_of(value) if given or not missing else None
        self._object = None
        if call is None:
            pieces.rewind(len(self._opened))
            shown.append(self._spaced.text(self._opened))
        else:
            pieces.rewind(pieces.since_mark(pieces.place))
            self._spaced.call()
            calls.append(call)
            self._closing = True
        return True

    def _close(self, last: bool) -> bool:
        """Skips the closing tag after a call; returns False if it has not arrived yet."""
        pieces = self._pieces
        rest = pieces.text[pieces.place :]
        pieces.place += len(rest) - len(rest.lstrip())
        rest = pieces.text[pieces.place : pieces.place + len(CLOSE)]
        if rest != CLOSE and CLOSE.startswith(rest) and not last:
            return False
        # The text may also end inside the tag.
        if CLOSE.startswith(rest):
            pieces.read(pieces.place + len(rest))
        elif rest.startswith("{"):
            self._begin("")
        self._closing = False
        return True


def listed_calls(whole: str) -> list[Call]:
    """The calls of a JSON list of calls, whose end may be cut off; none if one is not valid."""
    calls, place, before = [], 0, "["
    while (begin := whole.find("{", place)) >= 0 and whole[place:begin].strip() == before:
        item = _Object()
        place, before = item.read(whole, begin), ","
        if not item.whole:
            break
        if (call := call_of(read_value(whole[begin:place]))) is None:
            return []
        calls.append(call)
    return calls


class _Object:
    """Finds the end of a JSON object without parsing it.

    Attributes:
        depth: Number of open brackets.
        whole: Whether the last bracket is closed.
        broken: Whether the text cannot be a JSON object.
    """

    def __init__(self) -> None:
        self.depth, self.whole, self.broken = 0, False, False
        self._in_string = self._escaped = False

    def read(self, text: str, place: int) -> int:
        """Continues at ``place``; returns the position after the object, of a break, or the text's end."""
        while place < len(text):
            if self._escaped:
                self._escaped = False
                place += 1
                continue
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, place)
            if self.depth == 0 and text[place : found.start() if found else None].strip():
                self.broken = True
                return place
            if found is None:
                return len(text)
            place, sign = found.start(), found[0]
            if sign == '"' and self.depth:
                self._in_string = not self._in_string
            elif sign == "\\" and self._in_string:
                self._escaped = True
            elif sign == "{" or (sign == "[" and self.depth):
                self.depth += 1
            elif sign in "]}" and self.depth:
                self.depth -= 1
                if self.depth == 0:
                    self.whole = True
                    return place + 1
            else:
                self.broken = True
                return place
            place += 1
        return place
