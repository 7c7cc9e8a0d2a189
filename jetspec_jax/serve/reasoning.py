"""Reasoning at the beginning of an answer, taken apart from the answer while both arrive."""

from jetspec_jax.serve.parsers import Markers


def held(text: str, marker: str) -> int:
    """Characters at the end of a text that may be the beginning of a marker."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(marker[:size])), 0)


class Reasoning:
    """Tells reasoning and answer apart, piece by piece.

    Reasoning stands at the very beginning, once: later markers are text of the answer.
    """

    def __init__(self, markers: Markers | None, *, begun: bool = False):
        """Begins before the first piece.

        Args:
            markers: What stands around the reasoning; None leaves all in the answer.
            begun: Whether the prompt has opened it already.
        """
        self._markers, self._text = markers, ""
        self._state = "answer" if markers is None else "reasoning" if begun else "start"

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Takes a piece of text; gives what is known now of reasoning and answer."""
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
        """Finds out what comes, as far as the text so far tells."""
        assert self._markers is not None
        start, without = self._markers.start, self._markers.without
        text = self._text.lstrip()
        if text.startswith(start):
            self._text, self._state = text[len(start) :], "reasoning"
        elif without is not None and text.startswith(without):
            self._text, self._state = text[len(without) :], "answer"
        elif last or not any(marker.startswith(text) for marker in (start, without) if marker is not None):
            self._state = "answer"
