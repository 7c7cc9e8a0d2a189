"""Separates the reasoning at the beginning of an answer from the answer, incrementally."""

from jetspec_jax.serve.calls import held
from jetspec_jax.serve.parsers import Markers


class Reasoning:
    """An incremental parser of reasoning.

    Reasoning occurs once, at the very beginning; later markers are text.
    """

    def __init__(self, markers: Markers | None, *, begun: bool = False):
        """``begun``: the prompt ends inside the reasoning."""
        self._markers, self._text = markers, ""
        self._state = "answer" if markers is None else "reasoning" if begun else "start"
        # Whitespace before the first marker.
        self._spaces: list[str] = []

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Processes a piece of text; returns the new reasoning and the new answer."""
        if self._state == "start" and not self._text:
            begun = text.lstrip()
            self._spaces.append(text[: len(text) - len(begun)])
            text = begun
        self._text += text
        reasoning = ""
        if self._state == "start":
            self._begin(last)
        if self._state == "reasoning":
            assert self._markers is not None
            before, found, after = self._text.partition(self._markers.end)
            if found:
                reasoning, self._text, self._state = before, after, "answer"
            else:
                cut = len(before) - (0 if last else held(before, self._markers.end))
                reasoning, self._text = before[:cut], before[cut:]
        answer = ""
        if self._state == "answer":
            answer, self._text = self._text, ""
        return reasoning, answer

    def _begin(self, last: bool) -> None:
        """Decides whether the text begins with reasoning, if enough of it is there."""
        assert self._markers is not None
        start = self._markers.start
        if self._text.startswith(start):
            self._text, self._state = self._text.removeprefix(start), "reasoning"
        elif last or not start.startswith(self._text):
            self._text, self._state = "".join(self._spaces) + self._text, "answer"
