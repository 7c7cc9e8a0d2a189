"""Filters of training prompts: repetitive, repeated, and overlapping with the prompts of an evaluation."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: Why a prompt is dropped.
UNENDED, SHORT, REPEATS, TWICE, OVERLAPS = (
    "does not end",
    "too short",
    "repeats itself",
    "has the words of an earlier one",
    "shares a run of words with an evaluated prompt",
)
#: Words of a run; a training prompt must not share a run with an evaluated prompt.
RUN = 10
_WORD = re.compile(r"[^\W_]+")


class UserPrompt(NamedTuple):
    """A training prompt.

    Attributes:
        kind: Its source.
        form: The form that a set has it in; "" without forms.
        text: What the user says, or the beginning of a text.
        tokens: What the target continues.
        root: The question, which is the same in all of its forms; "" if it is the text.
    """

    kind: str
    form: str
    text: str
    tokens: tuple[int, ...] = ()
    root: str = ""


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


def without_overlap(
    prompts: Iterable[UserPrompt], evaluated: Evaluated
) -> tuple[list[UserPrompt], Counter[tuple[str, str]]]:
    """The prompts with distinct words that share no run of words with an evaluated prompt.

    The second result is the number of dropped prompts by kind and reason.
    """
    kept, dropped, seen = [], Counter(), set()
    for prompt in prompts:
        words = same_words(prompt.text)
        if words in seen:
            dropped[prompt.kind, TWICE] += 1
        elif evaluated.shares_a_run(prompt.text):
            dropped[prompt.kind, OVERLAPS] += 1
        else:
            seen.add(words)
            kept.append(prompt)
    return kept, dropped


def fault(text: str, *, least_words: int = 4, ngram: int = 4, times: int = 2) -> str | None:
    """Why a prompt that a model wrote is dropped, `SHORT` or `REPEATS`; None if it is kept.

    Args:
        ngram: Words of a run.
        times: The number of times that a run may occur in a prompt.
    """
    words = text.split()
    if len(words) < least_words:
        return SHORT
    return REPEATS if max(Counter(_runs(words, ngram)).values(), default=0) > times else None


def same_words(text: str) -> tuple[str, ...]:
    """The words of a text, which are equal for texts that differ in case, spaces and punctuation alone.

    A text without words is its only word.
    """
    return tuple(_words(text)) or (text,)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _runs(words: Sequence[str], length: int) -> Iterable[tuple[str, ...]]:
    if length:
        yield from (tuple(words[i : i + length]) for i in range(len(words) - length + 1))
