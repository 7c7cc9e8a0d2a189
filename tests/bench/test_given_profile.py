"""The profile that a benchmark is given: is it judged on the prompts that it was measured on?"""

import json
from pathlib import Path

import pytest

from bench.common.given_profile import describe_profile, profile_notes

KEPT = Path(__file__).parents[2] / "bench" / "results"


def run_of(prompts, skip, count):
    return {"prompts": prompts, "skip_prompts": skip, "num_prompts": count}


def notes(path, given):
    return profile_notes({**describe_profile(path), "arguments": given})


@pytest.fixture
def profile(tmp_path):
    """Writes a profile that says such things of its run."""

    def write(meta):
        path = tmp_path / "profile.json"
        path.write_text(json.dumps({"depth_rank_accept": [[0.5]], "meta": meta}))
        return path

    return write


@pytest.mark.parametrize(
    ("theirs", "ours", "both"),
    [
        (run_of("demo", 0, 64), run_of("demo", 0, 32), 32),
        (run_of("demo", 32, 64), run_of("demo", 0, 33), 1),
        (run_of("demo", 32, 64), run_of("demo", 90, 20), 6),
        (run_of("demo", 32, 64), run_of("demo", 0, 32), 0),
        (run_of("demo", 0, 32), run_of("demo", 32, 64), 0),
        (run_of("gsm8k", 0, 64), run_of("demo", 0, 64), 0),
        (run_of("mine.jsonl", 0, 4), run_of("elsewhere/mine.jsonl", 2, 9), 2),
    ],
)
def test_prompts_of_the_profile_in_this_run_are_counted(profile, theirs, ours, both):
    found = notes(profile({"arguments": theirs}), ours)
    assert len(found) == (both > 0)
    whose = f"on {theirs['num_prompts']} prompts of {theirs['prompts']}: "
    known = f"of the {ours['num_prompts']} prompts of this run it knows {both}, "
    assert all(whose + known in note for note in found)


def test_profiles_from_before_prompts_could_be_skipped(profile):
    theirs = profile({"arguments": {"prompts": "demo", "num_prompts": 48}})
    [note] = notes(theirs, run_of("demo", 0, 16))
    assert note.startswith("The profile was measured on 48 prompts of demo: of the 16 prompts of this run it")
    assert notes(theirs, run_of("demo", 48, 16)) == []


def test_the_kept_profile_knows_none_of_the_prompts_that_the_kept_table_judges_it_on():
    report = json.loads((KEPT / "decode-demo-h200-all.json").read_text())
    described = describe_profile(KEPT / "profile-demo.json")
    assert described.items() <= report.items()
    assert described["profile_prompts"]["skip_prompts"] >= report["arguments"]["num_prompts"]
    assert profile_notes(report) == []


@pytest.mark.parametrize("meta", [None, [], {}, {"arguments": 3}, {"arguments": {"prompts": "demo"}}])
def test_a_profile_need_not_say_anything(profile, meta):
    assert notes(profile(meta), run_of("demo", 0, 16)) == []


def test_no_profile_no_note():
    assert notes(None, run_of("demo", 0, 16)) == []
