"""What is taken of several sources, and what is learnt once."""

import numpy as np
import pytest

from train.data.mixing import BY_PROMPT, EXACT, NONE, distinct_turns, mix
from train.data.records import Document


@pytest.mark.parametrize(
    ("weights", "expected"),
    [(None, "abcdefghij"), ([1, 1], "acdfghij"), ([3, 1], "abcdefhj"), ([0.3, 0.2], "abcdefghij")],
)
def test_shares(weights, expected):
    assert "".join(mix(["abcdef", "ghij"], weights)) == expected


@pytest.mark.parametrize(
    ("weights", "complaint"),
    [
        ([1], "1 weights for 2 sources"),
        ([1, 0], "must be a positive number, not 0"),
        ([1, float("nan")], "must be a positive number, not nan"),
        ([1, float("inf")], "must be a positive number, not inf"),
        ([1, 100], "source 1 would have no entry in the mix"),
    ],
)
def test_weights_that_make_no_mix(weights, complaint):
    with pytest.raises(ValueError, match=complaint):
        mix(["abcdef", "ghij"], weights)


def document(text):
    """Lower-case letters are given, capitals are to be learnt."""
    return Document(np.array([ord(c.lower()) for c in text], np.int32), np.array([c.isupper() for c in text]))


def text(document):
    if document is None:
        return None
    letters = map(chr, document.tokens)
    return "".join(c.upper() if own else c for c, own in zip(letters, document.learn, strict=True))


@pytest.mark.parametrize(
    ("by", "texts", "expected"),
    [
        (NONE, ["uvA", "uvA"], ["uvA", "uvA"]),
        (EXACT, ["uvA", "uvA", "uvB"], ["uvA", None, "uvB"]),
        (BY_PROMPT, ["uvA", "uvA", "uvB"], ["uvA", None, None]),
        # Two requests of one conversation: the longer one has both turns.
        (EXACT, ["uvA", "uvAwxB"], [None, "uvAwxB"]),
        (EXACT, ["uvAwxB", "uvAwxC"], ["uvAwxB", "uvawxC"]),
        (BY_PROMPT, ["uvAwxB", "uvAwxC"], ["uvAwxB", None]),
        # Of a text everything but its first token is learnt.
        (BY_PROMPT, ["aBC", "aBD", "aBC"], ["aBC", "aBD", None]),
    ],
)
def test_turns_are_learnt_once(by, texts, expected):
    assert [text(own) for own in distinct_turns([document(own) for own in texts], by)] == expected
