"""Which training prompts are dropped: runs of words that evaluated ones have too, and repetitions."""

import pytest

from train.data.prompt_filters import (
    OVERLAPS,
    REPEATS,
    RUN,
    SHORT,
    TWICE,
    Evaluated,
    UserPrompt,
    fault,
    without_overlap,
)

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


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Why?", SHORT),
        ("Why is it so?", None),
        ("a b c d a b c d a b c d", REPEATS),
        ("a b c d a b c d a b c", None),
    ],
)
def test_short_and_repetitive_prompts_are_dropped(text, reason):
    assert fault(text) == reason


def test_evaluated_words_and_repeated_prompts_are_dropped():
    text = "one two three four five six seven eight nine ten"
    prompts = [
        UserPrompt("free", "", f"{text} eleven"),
        *[UserPrompt("code", "", "another prompt")] * 2,
        UserPrompt("code", "", "Another  PROMPT?"),
        *[UserPrompt("chat", "", text) for text in ("b", "+", "-", "+")],
    ]
    kept, dropped = without_overlap(prompts, Evaluated([text]))
    assert [prompt.text for prompt in kept] == ["another prompt", "b", "+", "-"]
    assert dropped == {("free", OVERLAPS): 1, ("code", TWICE): 2, ("chat", TWICE): 1}
