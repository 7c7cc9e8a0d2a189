"""Which methods are compared, and the profile that they are given: was it measured on the same prompts?"""

import json
from pathlib import Path

import pytest

from bench.common.given_profile import describe_profile, profile_notes
from bench.common.methods import choose_algorithms
from jetspec_jax.tree import algorithm_names, get_algorithm

KEPT = Path(__file__).parents[2] / "bench/results/demo"


def test_a_profile_reaches_the_algorithm_below_auto(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(json.dumps({"depth_rank_accept": [[0.5, 0.1]]}))
    chosen = choose_algorithms(["accum_logp", "auto"], ['auto.tree="depth_rank_histogram"'], profile)
    assert chosen["accum_logp"] == "accum_logp"
    assert chosen["auto"].shape.profile.depth_rank_accept == ((0.5, 0.1),)
    with pytest.raises(ValueError, match="none of auto takes a profile"):
        choose_algorithms(["auto"], ['tree="hybrid"'], profile)


def test_all():
    assert list(choose_algorithms(["all"])) == list(algorithm_names())


def test_options_and_a_profile_go_to_those_that_have_them(tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text('{"version": 1, "depth_rank_accept": [[0.5, 0.1]]}')
    names = ["top2gap_fanout", "depth_rank_histogram", "chain"]
    options = ["top2gap_fanout.beta=2.0", "depth_rank_histogram.tau=0.2"]
    chosen = choose_algorithms(names, options, profile)
    assert chosen["top2gap_fanout"] == get_algorithm("top2gap_fanout", {"beta": 2.0})
    table = json.loads(profile.read_text())
    assert chosen["depth_rank_histogram"] == get_algorithm("depth_rank_histogram", {"tau": 0.2}, table)
    assert chosen["chain"] == "chain"


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
        (run_of("demo", 32, 64), run_of("demo", 90, 20), 6),
        (run_of("gsm8k", 0, 64), run_of("demo", 0, 64), 0),
        (run_of("mine.jsonl", 0, 4), run_of("elsewhere/mine.jsonl", 2, 9), 2),
        # Of a time when prompts could not be skipped.
        ({"prompts": "demo", "num_prompts": 48}, run_of("demo", 0, 16), 16),
    ],
)
def test_prompts_of_the_profile_in_this_run_are_counted(profile, theirs, ours, both):
    found = notes(profile({"arguments": theirs}), ours)
    assert [f"this run decodes {both} of them" in note for note in found] == [True] * (both > 0)


def test_the_kept_profile_knows_none_of_the_prompts_that_the_kept_table_judges_it_on():
    report = json.loads((KEPT / "decode-h200-all.json").read_text())
    described = describe_profile(KEPT / "profile.json")
    assert described.items() <= report.items()
    assert described["profile_prompts"]["skip_prompts"] >= report["arguments"]["num_prompts"]
    assert profile_notes(report) == []


@pytest.mark.parametrize("meta", [None, [], {}, {"arguments": 3}, {"arguments": {"prompts": "demo"}}])
def test_a_profile_need_not_say_anything_nor_be_there(profile, meta):
    for path in profile(meta), None:
        assert notes(path, run_of("demo", 0, 16)) == []
