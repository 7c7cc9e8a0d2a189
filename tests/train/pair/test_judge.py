"""Which held-out prompts are judged, and what is said of the measurements."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import jax.numpy as jnp
import pytest

from tests.train.pair.tiny import changed
from train.pair.judge import (
    CALIBRATED,
    CHOSE,
    LONG,
    SEEN,
    Split,
    draw_judgement,
    judgement_of,
    split_prompts,
    table_of,
)
from train.pair.recipe import Calibration, Judgement

PARTS = ("judged", "calibrated", "choosing")


def prompt(number, text="", root="", tokens=1):
    return {
        "root": root or f"question {number}",
        "text": text or f"question {number}",
        "tokens": [number] * tokens,
    }


def split(rows, room=10, **changes):
    """The numbers of the training prompts, and the division."""
    training, found = split_prompts(rows, changed(**changes), room)
    return [row["tokens"][0] for row in training], found


def numbers(found):
    return [{row["tokens"][0] for row in getattr(found, part)} for part in PARTS]


def test_each_prompt_has_one_use():
    training, found = split([*map(prompt, range(200))], judgement=Judgement(prompts=33), heldout=60)
    parts = numbers(found)
    assert [*map(len, parts)] == [33, 8, 19]
    assert sorted([*training, *(number for part in parts for number in part)]) == [*range(200)]
    assert not found.dropped


def test_the_parts_shrink_to_their_least_together():
    large = {"judgement": Judgement(prompts=64), "calibration": Calibration(prompts=64), "heldout": 60}
    assert [*map(len, numbers(split([*map(prompt, range(200))], **large)[1]))] == [51, 8, 1]
    large["heldout"] = 200
    assert [*map(len, numbers(split([*map(prompt, range(500))], **large)[1]))] == [64, 64, 72]


def test_all_forms_of_a_question_are_in_one_part():
    rows = [
        prompt(number, text=f"{form} {number // 2}", root=f"Question {number // 2}{form}")
        for number, form in enumerate("?!" * 100)
    ]
    training, found = split(rows, judgement=Judgement(prompts=33), heldout=60)
    parts = numbers(found)
    assert [*map(len, parts)] == [32, 8, 20]
    for part in (*parts, set(training)):
        assert {number ^ 1 for number in part} == part


def test_what_training_sees_and_what_is_too_long_is_not_used():
    """Held-out texts that are a training prompt's question, or whose question is a training prompt's text."""
    rows = [*map(prompt, range(200))]
    training, found = split(rows, heldout=60)
    one, other, third, fourth = sorted(set(range(200)) - set(training))[:4]
    rows[one]["text"] = f"QUESTION\n{training[0]}..."
    rows[other]["root"] = "Who?"
    rows[training[1]]["text"] = "WHO"
    rows[third] = prompt(third, tokens=11)
    rows[fourth]["text"] = f"question {fourth} {training[0]}"
    training, found = split(rows, heldout=60)
    assert found.dropped == {SEEN: 2, LONG: 1}
    used = set().union(*numbers(found))
    assert used.isdisjoint({one, other, third, *training})
    assert len(used) == 57
    assert fourth in used


def test_too_few_prompts_are_refused():
    rows = [*map(prompt, range(120))]
    held = sorted(set(range(120)) - set(split(rows, heldout=42)[0]))
    for number in held[:2]:
        rows[number] = prompt(number, tokens=11)
    message = (
        "41 held-out prompts must be left: 32 to judge, 8 to calibrate and 1 to choose the best weights; 40 "
        f"of 42 remain, with 40 questions (2 {LONG}): set heldout higher"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        split(rows, heldout=42)
    # Conversations of 20 prompts do not divide into 32 and 8.
    rows = [prompt(number, root=f"conversation {number // 20}") for number in range(200)]
    with pytest.raises(ValueError, match=r"60 of 60 remain, with 3 questions \(none was dropped\)"):
        split(rows, heldout=60)


def row(temperature, budget, gain):
    speeds = {"tokens_per_second": 100.0 * gain, "plain_tokens_per_second": 100.0, "times_plain": gain}
    return {"temperature": temperature, "budget": budget, "tau": 2.5, **speeds}


@pytest.mark.parametrize(
    ("gains", "best"),
    [
        ({16: (2.0, 1.5), 64: (3.0, 1.4)}, 64),
        ({16: (2.0, 1.5), 64: (3.0, 0.9)}, 16),
        ({16: (1.1, 0.9), 64: (1.2, 0.8)}, 1),
    ],
)
def test_the_recommended_budget(gains, best, tmp_path):
    rows = [
        row(temperature, budget, gain)
        for budget, pair in gains.items()
        for temperature, gain in zip((0.0, 1.0), pair, strict=True)
    ]
    target = SimpleNamespace(mesh=None, dtype=jnp.dtype("float32"))
    report = judgement_of(rows, Split([{}] * 40, [{}] * 4, [{}] * 5, {SEEN: 3}), target)
    assert report["recommended_budget"] == best
    assert report["prompts"] == 40
    assert report["prompts_not_judged"] == {SEEN: 3, CHOSE: 5, CALIBRATED: 4}
    table = table_of(report)
    assert len(table) == 2 + len(rows)
    assert table[2].startswith("| 0 | 16 | 2.50 | ")
    draw_judgement(report, "a target", tmp_path / "judge.svg")
    text = "".join(ElementTree.parse(tmp_path / "judge.svg").getroot().itertext())
    assert "a target: 40 held-out prompts" in text
    assert "T = 1" in text
