"""Reasoning at the beginning of an answer, taken apart from the answer while both arrive."""

from jetspec_jax.serve.calls import held
from jetspec_jax.serve.harmony import Harmony
from jetspec_jax.serve.parsers import Markers


class Reasoning:
    """Tells reasoning and answer apart, piece by piece.

    Reasoning stands at the very beginning, once: later markers are text of the answer. `Harmony` reads
    answers that are sequences of messages.
    """

    def __init__(self, markers: Markers | None, *, begun: bool = False):
        """Begins before the first piece.

        Args:
            markers: What stands around the reasoning; None leaves all in the answer.
            begun: Whether the prompt has opened it already.
        """
        self._markers, self._text = markers, ""
        self._messages = Harmony(begun=begun) if markers is not None and markers.messages else None
        self._state = "answer" if markers is None else "reasoning" if begun else "start"
        # White space before the first marker.
        self._spaces: list[str] = []

    def feed(self, text: str, *, last: bool = False) -> tuple[str, str]:
        """Takes a piece of text; gives what is known now of reasoning and answer."""
        if self._messages is not None:
            return self._messages.feed(text, last=last)[:2]
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
        """Finds out what comes, as far as the text so far tells."""
        assert self._markers is not None
        start = self._markers.start
        if self._text.startswith(start):
            self._text, self._state = self._text.removeprefix(start), "reasoning"
        elif last or not start.startswith(self._text):
            self._text, self._state = "".join(self._spaces) + self._text, "answer"
