"""Finds training prompts that overlap with the prompts of an evaluation."""

import re
from collections.abc import Iterable

#: Words of a run; a training prompt must not share a run with an evaluated prompt.
RUN = 10
_WORD = re.compile(r"[^\W_]+")


class Evaluated:
    """The runs of words of all evaluated texts. A word is letters and digits, in lower case.

    An evaluated text shorter than a run counts as a single run.
    """

    def __init__(self, texts: Iterable[str]):
        """Collects the runs of some texts."""
        self._runs: set[tuple[str, ...]] = set()
        for text in texts:
            words = _words(text)
            self._runs.update(_runs(words, min(RUN, len(words))))
        self._lengths = sorted({len(run) for run in self._runs})

    @property
    def count(self) -> int:
        """The number of distinct runs."""
        return len(self._runs)

    def shares_a_run(self, text: str) -> bool:
        """Whether a text has a run of words of an evaluated text."""
        words = _words(text)
        return any(run in self._runs for length in self._lengths for run in _runs(words, length))


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: list[str], length: int) -> Iterable[tuple[str, ...]]:
    if length:
        yield from (tuple(words[i : i + length]) for i in range(len(words) - length + 1))
