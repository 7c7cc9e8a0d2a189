"""Which held-out prompts are judged, and what is said of the measurements."""

import re
from types import SimpleNamespace
from xml.etree import ElementTree

import jax.numpy as jnp
import pytest

from train.pair.judge import (
    CHOSE,
    LONG,
    SEEN,
    HeldPrompt,
    Split,
    draw_judgement,
    judgement_of,
    split_held_out,
    table_of,
)

HELD = [HeldPrompt(f"question {i}", [i, i]) for i in range(60)]


def split(held=HELD, training=(), chose=(), judged=64, calibrated=8, room=10):
    return split_held_out(held, training, set(chose), judged=judged, calibrated=calibrated, room=room)


def test_what_training_saw_is_neither_judged_nor_calibrated():
    held = [*HELD, HeldPrompt("a long one", [7] * 11)]
    found = split(held, ["Question 3?", "QUESTION\n5", "question", "other"], [(7, 7), (9, 9)])
    assert found.dropped == {SEEN: 2, CHOSE: 2, LONG: 1}
    used = [*found.judged, *found.calibrated]
    assert len(found.calibrated) == 8
    assert sorted(ids[0] for ids in used) == [i for i in range(60) if i not in (3, 5, 7, 9)]


def test_the_judgement_comes_before_the_calibration():
    assert [len(part) for part in split(HELD[:35])[:2]] == [32, 3]
    assert [len(part) for part in split(judged=40)[:2]] == [40, 8]
    assert [len(part) for part in split(HELD[:32])[:2]] == [32, 0]


def test_fewer_than_32_prompts_are_not_judged():
    message = (
        "a judgement needs 32 prompts that training has not seen; 31 of 33 held-out ones remain "
        f"(1 {SEEN}, 1 {CHOSE}): set heldout higher"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        split(HELD[:33], ["question 0"], [(1, 1)])
    with pytest.raises(ValueError, match=r"31 of 31 held-out ones remain \(none was dropped\)"):
        split(HELD[:31])


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
    report = judgement_of(rows, Split([[1]] * 40, [[2]] * 4, {SEEN: 3}), target)
    assert report["recommended_budget"] == best
    assert (report["prompts"], report["prompts_not_judged"][SEEN]) == (40, 3)
    table = table_of(report)
    assert len(table) == 2 + len(rows)
    assert table[2].startswith("| 0 | 16 | 2.50 | ")
    draw_judgement(report, "a target", tmp_path / "judge.svg")
    text = "".join(ElementTree.parse(tmp_path / "judge.svg").getroot().itertext())
    assert "a target: 40 held-out prompts" in text
    assert "T = 1" in text
