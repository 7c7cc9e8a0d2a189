"""Parser of one call in tags: ``<function=name><parameter=key>value</parameter></function>``.

Models omit tags, and values quote tags. The position of a tag decides whether it is structure or text:

* If a value begins on a new line, the tags after it begin lines too. Other tags in it are text.
* ``</parameter>`` ends a value if it is followed by another tag of a call, or by the end of the text.
* Without ``</parameter>``, ``<parameter=key>`` ends a value if the tool has this parameter and the call has
  no value for it yet.
* ``</function>`` and ``</tool_call>`` end a value if they are followed by nothing or by another call. If text
  follows, they do so only if the value has no other end.
* A call within a value is text from its ``<function=name>`` to its ``</function>``.
"""

import enum
from collections.abc import Callable
from dataclasses import dataclass

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"


@dataclass(frozen=True, slots=True)
class Tag:
    """A tag. Offsets count from the beginning of the call."""

    kind: str
    name: str
    begin: int
    end: int


@dataclass(slots=True)
class Value:
    """The position of a parameter's value.

    A value is ``guessed`` if the one before it was ended only by this parameter's tag.
    """

    key: str
    begin: int
    end: int = -1
    closed: bool = False
    guessed: bool = False


class _State(enum.Enum):
    """The expected input."""

    OPENED = enum.auto()  # the function
    BETWEEN = enum.auto()  # a parameter, or the function's end
    VALUE = enum.auto()  # the end of a value
    VALUE_END = enum.auto()  # the confirmation that "</parameter>" ended a value
    CALL_END = enum.auto()  # the confirmation that "</function>" or "</tool_call>" ended a value
    ENDED = enum.auto()  # "</tool_call>", optionally


class TagReader:
    """Parses a call; it is finished once `end` or `failed` is set.

    Attributes:
        name: The function's name.
        values: The parameters' values.
        end: Offset of the call's end.
        failed: Whether the text is not a call.
        inner: Offsets of the calls that are quoted in values.
    """

    def __init__(self, has_parameter: Callable[[str, str], bool]):
        """Starts before the first tag."""
        self.name = ""
        self.values: list[Value] = []
        self.end: int | None = None
        self.failed = False
        self.inner: list[int] = []
        self._has_parameter, self._state = has_parameter, _State.OPENED
        # The index in `values` of each parameter.
        self._places: dict[str, int] = {}
        # Of the text since the last tag: whether it is whitespace, has line ends, ends in whitespace, and
        # whether its last line is only whitespace.
        self._blank, self._newline, self._spaced, self._on_line = True, False, False, False
        # Of the current value: whether it begins on a new line, the number of open quoted calls, the offset
        # of the first of them, and whether a quoted call has just been closed.
        self._lined: bool | None = None
        self._depth, self._quoted_at, self._quoted = 0, 0, False
        # The ends of the value and the call if the previous tag ends them. If text follows such a tag, the
        # ends are kept for the case that there are no others; the weak pair is for "</parameter>".
        self._value_stop, self._stop = 0, 0
        self._first_stops: tuple[int, int] | None = None
        self._weak_stops: tuple[int, int] | None = None
        self._before = Tag(OPEN, "", 0, 0)
        self._was_structure = False

    @property
    def over(self) -> bool:
        """Whether the call has ended or failed."""
        return self.failed or self.end is not None

    @property
    def ended(self) -> bool:
        """Whether only ``</tool_call>`` may still belong to the call."""
        return self._state is _State.ENDED

    @property
    def may_end(self) -> bool:
        """Whether all values have an end, so that a closing tag can follow."""
        ends = _State.VALUE_END, _State.CALL_END, _State.ENDED
        return self._state in ends or (self._state is _State.BETWEEN and bool(self.values))

    def text(self, text: str) -> None:
        """Processes text between two tags, or a piece of it."""
        blank = not text.strip()
        if not blank and self._state in (_State.OPENED, _State.BETWEEN):
            self.failed = True
        elif not blank and self._state is _State.ENDED:
            self.end = self._stop
        elif text:
            _, newline, line = text.rpartition("\n")
            self._on_line = not line.strip() and (bool(newline) or self._on_line)
            self._blank, self._newline = self._blank and blank, self._newline or bool(newline)
            self._spaced = text[-1].isspace()
            if self._lined is None and (begun := text.lstrip(" \t\r")):
                self._lined = begun[0] == "\n"

    def tag(self, tag: Tag) -> None:
        """Processes a tag."""
        self._lined = bool(self._lined)
        if self._state is _State.OPENED:
            self.name, self._state, self.failed = tag.name, _State.BETWEEN, tag.kind != FUNCTION
        elif self._state is _State.BETWEEN:
            self._between(tag)
        elif self._state is _State.VALUE:
            self._value(tag)
        elif self._state is _State.VALUE_END:
            self._value_end(tag)
        elif self._state is _State.CALL_END:
            self._call_end(tag)
        else:
            self.end = tag.end if tag.kind == CLOSE else self._stop
        self._before = tag
        self._blank, self._newline, self._spaced, self._on_line = True, False, False, False

    def finish(self, end: int, *, cut: bool) -> None:
        """Processes the end of the text.

        Args:
            end: Offset of the end.
            cut: Whether the text ends at its length limit.
        """
        if self._state is _State.VALUE_END and self._blank:
            self._end_value(self._value_stop, closed=True)
        elif self._state is _State.CALL_END and self._blank:
            self._end_value(self._value_stop)
            self.end = self._stop
        elif self._state in (_State.VALUE, _State.VALUE_END, _State.CALL_END):
            self._keep_stops()
            if (stops := self._first_stops or self._weak_stops) is not None and not cut:
                self._end_at(stops)
        elif self._state is _State.ENDED:
            self.end = self._stop
        if self.end is None and self._state is _State.BETWEEN and self.values and not cut:
            self.end = end
        self.failed = self.end is None

    def _between(self, tag: Tag) -> None:
        if tag.kind == PARAMETER:
            self._begin_value(tag)
        elif tag.kind == FUNCTION_END:
            self._stop, self._state = tag.end, _State.ENDED
        elif tag.kind == CLOSE:
            self.end = tag.end
        elif tag.kind in (OPEN, FUNCTION) and self.values:
            self.end = tag.begin
        else:
            self.failed = True

    def _value(self, tag: Tag) -> None:
        after_quoted, self._quoted = self._quoted and self._blank, False
        adjacent = self._blank and self._was_structure
        structure = self._on_line or adjacent or not (self._lined or self._spaced)
        self._was_structure = structure
        if self._depth:
            if tag.kind == FUNCTION_END:
                self._depth -= 1
                self._quoted = self._depth == 0
                if self._quoted:
                    self.inner.append(self._quoted_at)
            elif tag.kind == FUNCTION and structure:
                self._depth += 1
        elif tag.kind == PARAMETER_END:
            self._value_stop, self._state = tag.begin, _State.VALUE_END
        elif not structure or (after_quoted and tag.kind == CLOSE):
            pass
        elif tag.kind == FUNCTION and self._first_stops is not None:
            self._end_at(self._first_stops)
        elif tag.kind == FUNCTION:
            opened = self._blank and self._before.kind == OPEN
            self._depth, self._quoted_at = 1, self._before.begin if opened else tag.begin
        elif tag.kind in (FUNCTION_END, CLOSE):
            self._value_stop, self._stop, self._state = tag.begin, tag.end, _State.CALL_END
        elif (
            tag.kind == PARAMETER
            and tag.name not in self._places
            and self._has_parameter(self.name, tag.name)
        ):
            self._end_value(tag.begin)
            self._begin_value(tag, guessed=True)

    def _value_end(self, tag: Tag) -> None:
        """Processes a tag after ``</parameter>``, which ended the value if structure follows."""
        # If the value began on a new line, this tag or the previous one must begin a line.
        structure = self._was_structure or self._newline or not self._lined
        if self._blank and tag.kind != PARAMETER_END and structure:
            self._end_value(self._value_stop, closed=True)
            self._between(tag)
        else:
            self._keep_stops()
            self._state, self._was_structure = _State.VALUE, False
            self._value(tag)

    def _call_end(self, tag: Tag) -> None:
        """Processes a tag after a closing tag in a value, which ended the call if another call follows."""
        if self._blank and tag.kind == CLOSE and self._before.kind == FUNCTION_END:
            self._stop = tag.end
        elif self._blank and tag.kind in (OPEN, FUNCTION):
            self._end_value(self._value_stop)
            self.end = self._stop
        else:
            self._keep_stops()
            self._state = _State.VALUE
            self._value(tag)

    def _keep_stops(self) -> None:
        """Keeps the ends at a closing tag that is followed by text, in case there are no others."""
        if self._state is _State.CALL_END and self._first_stops is None:
            self._first_stops = self._value_stop, self._stop
        elif self._state is _State.VALUE_END and self._weak_stops is None and self._was_structure:
            self._weak_stops = self._value_stop, self._value_stop + len(PARAMETER_END)

    def _end_at(self, stops: tuple[int, int]) -> None:
        self._end_value(stops[0])
        self.end = stops[1]

    def _begin_value(self, tag: Tag, *, guessed: bool = False) -> None:
        place = self._places.get(tag.name)
        if place is not None and self.values[place].guessed:
            # This is the real parameter, so the earlier guessed tag is text of the value before it.
            self.values[place - 1].end, self.values[place - 1].closed = (
                self.values[-1].end,
                self.values[-1].closed,
            )
            for value in self.values[place:]:
                self._places.pop(value.key, None)
            del self.values[place:]
        self._places.setdefault(tag.name, len(self.values))
        self.values.append(Value(tag.name, tag.end, guessed=guessed))
        self._state, self._lined, self._depth, self._quoted = _State.VALUE, None, 0, False
        self._first_stops = self._weak_stops = None
        self._was_structure = False

    def _end_value(self, end: int, *, closed: bool = False) -> None:
        self.values[-1].end, self.values[-1].closed = end, closed
        self._state = _State.BETWEEN
