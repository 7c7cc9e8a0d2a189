"""Runs of words that prompts share with evaluated ones."""

import pytest

from train.smollm2.overlap import RUN, Evaluated

TEXT = "Natalia sold 48 clips in April, and then she sold half as many."


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        (TEXT, True),
        ("Say: natalia SOLD 48 clips (in April) and then - she sold... more?", True),
        ("natalia sold 48 clips in april and then she ran", False),
        ("Natalia sold 48 clips in May, and then she sold half as many.", False),
        ("in April, and then she sold half as many", False),
        ("", False),
    ],
)
def test_a_run_of_ten_words_is_shared(text, shares):
    assert RUN == 10
    assert Evaluated([TEXT]).shares_a_run(text) is shares


def test_a_short_text_is_one_run():
    evaluated = Evaluated(["Write a haiku.", TEXT])
    assert evaluated.shares_a_run("Please write a haiku about rain.")
    assert evaluated.shares_a_run(TEXT)
    assert not evaluated.shares_a_run("Please write a sonnet.")


def test_a_text_without_words_shares_nothing():
    assert not Evaluated(["...", ""]).shares_a_run("a b c")
