"""Which held-out prompts are judged, and what is said of the measurements."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import jax.numpy as jnp
import pytest

from jetspec_jax.decode.settings import TreeSettings
from tests.train.pair.tiny import changed
from train.pair import judge
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
    return {"temperature": temperature, "budget": budget, "tau": 2.5, **speeds, "equal_outputs": 39}


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
    assert table[2].endswith(" | 39 of 40 |")
    draw_judgement(report, "a target", tmp_path / "judge.svg")
    text = "".join(ElementTree.parse(tmp_path / "judge.svg").getroot().itertext())
    assert "a target: 40 held-out prompts" in text
    assert "T = 1" in text


def test_plain_decoding_is_measured_once_for_all_budgets(monkeypatch):
    opened, decoded, closed = [], [], []

    class Made:
        def __init__(self, target, head, plan):
            self.plan = plan
            opened.append((head is not None, plan))

        def warm_up(self, kinds):
            assert len(kinds) == 1

        def close(self):
            closed.append(self.plan)

    def complete(made, requests, tokenizer, bar):
        decoded.append((made.plan, *requests))
        return [SimpleNamespace(token_ids=[1, 2, 3], accept_lengths=[3] if made.plan > 1 else [1] * 3)]

    monkeypatch.setattr(judge, "plan_engine", lambda target, head, settings, dtype, **_: settings.budget)
    monkeypatch.setattr(judge, "default_capacity", lambda config, need: need)
    monkeypatch.setattr(judge, "Engines", Made)
    monkeypatch.setattr(judge, "complete", complete)
    monkeypatch.setattr(
        judge, "make_requests", lambda target, plan, each, ids, params: [(ids[0][0], params[0].temperature)]
    )
    target = SimpleNamespace(config=None, dtype=None, mesh=None, tokenizer=None)
    trees = [TreeSettings(budget, None, None) for budget in (8, 16)]
    found = dict(judge.measure(target, SimpleNamespace(config=None), [[4], [5]], trees, [0.0, 1.0], 3, 0))
    assert opened == [(False, 1), (True, 8), (True, 16)]
    assert sorted(closed) == [1, 8, 16]
    # The first prompt is decoded once more before, and engines alternate.
    assert decoded == [(plan, (first, t)) for t in (0.0, 1.0) for first in (4, 4, 5) for plan in (1, 8, 16)]
    for temperature, rows in found.items():
        assert [(row["temperature"], row["budget"], row["tau"]) for row in rows] == [
            (temperature, 8, 3.0),
            (temperature, 16, 3.0),
        ]
        assert all((row["tokens"], row["rounds"], row["equal_outputs"]) == (6, 2, 2) for row in rows)
