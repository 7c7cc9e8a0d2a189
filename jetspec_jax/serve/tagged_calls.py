"""Parser of calls as tags: ``<tool_call><function=name><parameter=key>value</parameter></function>…``."""

import re
from collections.abc import Sequence

from jetspec_jax.serve import tag_reader as tags
from jetspec_jax.serve.calls import Call, Spaced, call_with, held
from jetspec_jax.serve.pieces import Pieces
from jetspec_jax.serve.tag_reader import Tag, TagReader
from jetspec_jax.serve.tools import Tool
from jetspec_jax.serve.typed_values import ObjectSchema

# Most characters of a name in a tag, so that searches take linear time.
_LONGEST_NAME = 128
_FIXED = tags.OPEN, tags.CLOSE, tags.FUNCTION_END, tags.PARAMETER_END
_NAMED = tags.FUNCTION, tags.PARAMETER
_TAG = re.compile(rf"({'|'.join(_FIXED)})|({'|'.join(_NAMED)})([^<>\n]{{1,{_LONGEST_NAME}}})>")
# Most open calls at the end of the text, each of which requires parsing the rest again.
_MOST_OPEN = 8


class TaggedCalls:
    """Finds calls in tags; `tag_reader` decides which tags are structure. Everything else is text.

    A call may lack its ``<tool_call>`` if its function is a tool and it is neither in a fenced block nor
    after a quote. Parsing takes linear time: calls fail at their first tags or at the end of the text.
    """

    def __init__(self, tools: Sequence[Tool]):
        self._schemas = {tool.function.name: ObjectSchema(tool.function.parameters) for tool in tools}
        self._pieces, self._spaced, self._lines = Pieces(), Spaced(), _Lines()
        self._reader: TagReader | None = None
        self._open_left = _MOST_OPEN
        self._shown: list[str] = []
        self._calls: list[Call] = []

    def feed(self, text: str, *, last: bool = False, cut: bool = False) -> tuple[str, list[Call]]:
        """As `Finder.feed`."""
        self._pieces.feed(text)
        while self._step(last):
            pass
        while last and self._reader is not None:
            self._finish(self._reader, cut)
            while self._step(last):
                pass
        if last:
            self._shown.append(self._spaced.end())
        shown, self._shown = self._shown, []
        calls, self._calls = self._calls, []
        return "".join(shown), calls

    def _step(self, last: bool) -> bool:
        """Reads text and the tag after it; returns False if there is no complete tag."""
        pieces, reader = self._pieces, self._reader
        found = _TAG.search(pieces.text, pieces.place)
        unread = _held(pieces.text, pieces.place)
        if last and not (reader is not None and _closes(reader, pieces.text[len(pieces.text) - unread :])):
            unread = 0
        text = pieces.read(found.start() if found else len(pieces.text) - unread)
        if reader is None:
            self._show(text)
        else:
            reader.text(text)
            if reader.over:
                self._settle(reader)
                return True
        if found is None:
            return False
        kind, name = found[1] or found[2], (found[3] or "").strip()
        if reader is None and not (kind == tags.OPEN or (kind == tags.FUNCTION and self._may_begin(name))):
            self._show(pieces.read(found.end()))
            return True
        if reader is None:
            pieces.mark()
            reader = self._reader = TagReader(self._has_parameter)
        begin = pieces.since_mark(pieces.place)
        pieces.read(found.end())
        tag = Tag(kind, name, begin, pieces.since_mark(pieces.place))
        if begin or kind != tags.OPEN:
            reader.tag(tag)
        if reader.over:
            self._settle(reader)
        return True

    def _finish(self, reader: TagReader, cut: bool) -> None:
        """Ends an open call at the end of the text, which may be inside a closing tag."""
        pieces = self._pieces
        end = pieces.since_mark(pieces.place)
        if rest := pieces.read(len(pieces.text)):
            if reader.may_end:
                reader.tag(Tag(tags.CLOSE, "", end, end + len(rest)))
            else:
                reader.text(rest)
        if not reader.over:
            reader.finish(pieces.since_mark(pieces.place), cut=cut)
        self._open_left -= 1
        if reader.failed or not self._open_left:
            inner = [] if cut or not self._open_left else reader.inner
            self._give_up(inner[0] if inner else pieces.since_mark(pieces.place))
        else:
            self._settle(reader)

    def _settle(self, reader: TagReader) -> None:
        """Emits a call that has ended; if it failed, emits its first tag as text."""
        if reader.end is None:
            found = _TAG.match(self._pieces.marked())
            assert found is not None
            self._give_up(found.end())
            return
        text = self._pieces.marked(reader.end)
        call = self._call(reader, text)
        if call is None:
            self._give_up(reader.end)
            return
        self._reader = None
        self._pieces.rewind(reader.end)
        self._spaced.call()
        self._lines.last = ""
        self._calls.append(call)

    def _give_up(self, length: int) -> None:
        """Emits ``length`` characters of a failed call as text, and continues after them."""
        self._reader = None
        text = self._pieces.marked(length)
        self._pieces.rewind(length)
        self._show(text)

    def _call(self, reader: TagReader, text: str) -> Call | None:
        """The call; None if a parameter has two different values."""
        schema, arguments = self._schemas.get(reader.name) or ObjectSchema(None), {}
        for position in reader.values:
            value = schema.value(position.key, _written(text[position.begin : position.end], position.closed))
            if arguments.setdefault(position.key, value) != value:
                return None
        return call_with(reader.name, arguments)

    def _show(self, text: str) -> None:
        self._lines.feed(text)
        self._shown.append(self._spaced.text(text))

    def _may_begin(self, name: str) -> bool:
        """Whether a function's tag begins a call without ``<tool_call>``."""
        return name in self._schemas and not self._lines.fenced and self._lines.last not in tuple("`'\"")

    def _has_parameter(self, function: str, key: str) -> bool:
        schema = self._schemas.get(function)
        return schema is None or schema.lists(key)


class _Lines:
    """The context at the end of a text.

    Attributes:
        fenced: Whether the end is in a block between lines that begin with three backticks.
        last: The last character.
    """

    def __init__(self) -> None:
        self.fenced, self.last, self._begin = False, "", ""

    def feed(self, text: str) -> None:
        """Appends a piece of text."""
        for number, line in enumerate(text.split("\n")):
            before = "" if number else self._begin
            self._begin = before if len(before) == 3 else (before + line).lstrip()[:3]
            self.fenced ^= self._begin == "```" != before
        self.last = text[-1:] or self.last


def _written(text: str, closed: bool) -> str:
    """A value without the line ends around it, and without the whitespace before a tag on a new line."""
    text = text.removeprefix("\n")
    if not closed:
        return text.rstrip("\n")
    lines, newline, last = text.rpartition("\n")
    return lines if newline and not last.strip() else text


def _held(text: str, place: int) -> int:
    """The number of characters at the end of a text, after ``place``, that may begin a tag."""
    begin = text.rfind("<", max(place, len(text) - _LONGEST_NAME - len(tags.PARAMETER)))
    if begin < 0:
        return 0
    rest = text[begin:]
    name = next((rest[len(tag) :] for tag in _NAMED if rest.startswith(tag)), None)
    begun = held(rest, *_FIXED, *_NAMED) == len(rest) if name is None else not re.search("[>\n]", name)
    return len(rest) if begun else 0


def _closes(reader: TagReader, text: str) -> bool:
    """Whether a text is certainly the beginning of a closing tag after the last value."""
    begun = any(tag.startswith(text) for tag in (tags.FUNCTION_END, tags.CLOSE))
    return begun and len(text) > (0 if reader.ended else 1)
