"""What a finished run was worth, read from what it left."""

import json

import pytest

from train.head.verdict import read_verdict


@pytest.fixture
def work(tmp_path):
    def write(best_step, looks, score=None):
        if score is None:
            kept = looks[best_step]
            score = kept["tau"]["128"] if "tau" in kept else -kept["validation_loss"]
        (tmp_path / "evaluation.json").write_text(json.dumps({"best_step": best_step, "score": score}))
        records = [{"step": 1, "loss": 2.0}, *({"step": step, **look} for step, look in looks.items())]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return tmp_path

    return write


def taus(small, large):
    return {"validation_loss": 1.0, "tau": {"16": small, "128": large}}


def test_a_head_that_became_better(work):
    looks = {0: taus(2.5, 3.0), 10: taus(2.4, 3.25), 20: taus(2.75, 3.125)}
    assert read_verdict(work(10, looks)) == (
        True,
        "improved on held-out documents: tau with budget 16 2.400 (2.500 before), "
        "tau with budget 128 3.250 (3.000 before)",
    )


def test_a_head_that_did_not(work):
    # The largest budget decides which evaluation was the best.
    looks = {0: taus(2.5, 3.0), 10: taus(2.4, 2.75), 20: taus(2.75, 2.5)}
    assert read_verdict(work(0, looks)) == (
        False,
        "not improved on held-out documents: at best tau with budget 16 2.400 (2.500 before), "
        "tau with budget 128 2.750 (3.000 before); the initial head is kept",
    )


def test_without_prompts_the_loss_decides(work):
    looks = {step: {"validation_loss": loss} for step, loss in ((0, 1.5), (10, 1.625), (20, 1.75))}
    improved, message = read_verdict(work(0, looks))
    assert not improved
    assert "at best validation loss 1.625 (1.500 before)" in message


def test_a_head_that_began_at_random_has_nothing_before_it(work):
    assert read_verdict(work(20, {10: taus(1.25, 1.5), 20: taus(1.5, 1.75)})) == (
        True,
        "on held-out documents: tau with budget 16 1.500, tau with budget 128 1.750",
    )


def test_the_numbers_are_those_that_chose_the_weights(work):
    """A resumed run evaluates some weights again, on some devices with other results."""
    looks = {0: taus(2.5, 3.0), 10: taus(2.4, 2.5)}
    assert read_verdict(work(10, looks, score=3.5)) == (
        True,
        "improved on held-out documents: tau with budget 16 2.400 (2.500 before), "
        "tau with budget 128 3.500 (3.000 before)",
    )
    losses = {0: {"validation_loss": 1.5}, 10: {"validation_loss": 1.25}}
    assert read_verdict(work(0, losses, score=-1.125)) == (
        False,
        "not improved on held-out documents: at best validation loss 1.250 (1.125 before); the initial head "
        "is kept",
    )


def test_a_loss_that_is_no_number_is_no_evaluation(work):
    looks = {0: {"validation_loss": 1.5}, 10: {"validation_loss": None}}
    assert read_verdict(work(0, looks)) == (
        False,
        "not improved on held-out documents: no evaluation gave a number; the initial head is kept",
    )
    looks[20] = {"validation_loss": 1.25}
    assert read_verdict(work(20, looks)).improved
