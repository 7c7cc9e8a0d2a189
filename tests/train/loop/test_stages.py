"""Work folders and the settings that they were made with."""

import itertools
import json

import pytest

from train.loop import stages
from train.loop.stages import Deadline, OutOfTime, claim, run_stages


def test_stages_run_once_and_a_time_limit_names_those_that_are_left(tmp_path, capsys):
    ran = []

    def first():
        ran.append("first")

    def second():
        ran.append("second")
        if len(ran) == 2:
            raise OutOfTime("at step 3")

    stages = {"first": first, "second": second, "third": lambda: ran.append("third")}
    with pytest.raises(OutOfTime, match=r"^stopped \(before first\); left: first, second, third$"):
        run_stages(tmp_path, stages, Deadline(0.0))
    assert ran == []
    with pytest.raises(OutOfTime, match=r"^stopped \(at step 3\); left: second, third$"):
        run_stages(tmp_path, stages, Deadline())
    for _ in range(2):
        run_stages(tmp_path, stages, Deadline())
    assert ran == ["first", "second", "second", "third"]
    again = "".join(f"{name}: done already\n" for name in stages)
    assert capsys.readouterr().out.endswith(again)


def test_seconds_of_a_stage_add_up_over_runs(tmp_path, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(stages.time, "perf_counter", lambda: float(next(clock)))
    runs = iter([OutOfTime("later"), KeyboardInterrupt(), None])

    def first():
        if (error := next(runs)) is not None:
            raise error

    for error in (OutOfTime, KeyboardInterrupt):
        with pytest.raises(error):
            run_stages(tmp_path, {"first": first}, Deadline())
    run_stages(tmp_path, {"first": first, "second": lambda: None}, Deadline())
    assert json.loads((tmp_path / "seconds.json").read_text()) == {"first": 3.0, "second": 1.0}


@pytest.mark.parametrize("damage", [b"{", b"\x00\xff", b"[]", b"[" * 10_000])
def test_a_damaged_recipe_is_named(tmp_path, damage):
    (tmp_path / "recipe.json").write_bytes(damage)
    with pytest.raises(ValueError, match=r"recipe\.json (is not valid JSON|must hold a JSON object)"):
        claim(tmp_path, {"seed": 0})


def test_of_many_differences_the_outermost_are_named(tmp_path):
    claim(tmp_path, {"target": "one", "config": {str(i): {"size": i} for i in range(20)}})
    with pytest.raises(ValueError, match="was made with another recipe") as error:
        claim(tmp_path, {"target": "other", "config": {}})
    said = str(error.value)
    assert "(target: one there, other here; config.0.size: 0 there, None here; " in said
    assert "; 11 more); give the same options" in said
