"""Which methods the benchmarks compare: algorithms by name, with their options and a profile."""

import json

import pytest

from bench.common.methods import choose_algorithms
from jetspec_jax.tree import algorithm_names, get_algorithm


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
