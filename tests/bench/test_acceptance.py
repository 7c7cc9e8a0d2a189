"""``python -m bench profile``: counts against plain loops."""

import re

import numpy as np
import pytest

from bench.acceptance import profile as profile_command
from bench.acceptance.counts import NO_RANK, TracedRound, count_reached, count_tree, ranks_of, trace_requests
from bench.common.workload import Workload
from jetspec_jax import SamplingParams
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.inspect.trace import RoundTrace
from jetspec_jax.tree import Profile
from tests.bench.conftest import text_prompt
from tests.decode.tiny import TINY

# The same in all tests, so that they share the programs that decode.
SETTINGS = ["--budget", "16", "--width", "3", "--implementation", "xla"]
PARAMS = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 1.0)]


def hand_made(tokens):
    """Candidates [5 6], [7 8], [9 4]; a tree of 5 below the anchor 1, then 7 and 8; 5 and 8 are accepted."""
    int32 = np.int32
    return TracedRound(
        None,
        RoundTrace(
            start=3,
            candidate_tokens=np.array([[5, 6], [7, 8], [9, 4]], int32),
            candidate_log_probs=np.log(np.array([[0.6, 0.3], [0.5, 0.4], [0.9, 0.1]], np.float32)),
            candidate_scores=np.log(np.array([[0.6, 0.3], [0.5, 0.4], [0.9, 0.1]], np.float32)),
            tokens=np.array([1, 5, 7, 8], int32),
            parents=np.array([-1, 0, 1, 1], int32),
            depths=np.array([0, 1, 2, 2], int32),
            scores=np.zeros(4, np.float32),
            tree_scores=np.zeros(4, np.float32),
            target_log_probs=np.zeros(4, np.float32),
            choices=np.array([5, 8, 4, 2], int32),
            path=np.array([0, 1, 3], int32),
            committed=np.array([5, 8, 2], int32),
        ),
        np.array(tokens, int32),
    )


@pytest.mark.parametrize(
    ("tokens", "ranks"),
    [
        ([5, 8, 2], [0, 1, NO_RANK]),
        ([6, 8, 4], [1, 1, 1]),  # also where the tree had no such node
        ([2, 8, 9], [NO_RANK]),  # nothing below a token that is no candidate is reached
        ([5], [0]),
        ([], []),
    ],
)
def test_ranks_of_what_follows(tokens, ranks):
    assert ranks_of(hand_made(tokens)).tolist() == ranks


def test_counts_of_a_hand_made_round():
    rounds = [hand_made([5, 8, 2]), hand_made([6])]
    reached = count_reached(rounds)
    assert reached.hits.tolist() == [[1, 1], [0, 1], [0, 0]]
    assert reached.nodes.tolist() == [2, 1, 1]
    assert reached.shares() == [[0.5, 0.5], [0.0, 1.0], [0.0, 0.0]]
    assert reached.shares(least_nodes=2) == [[0.5, 0.5]]
    # All four nodes of each tree: the pick 4 after the node 7, off the path, counts here.
    tree = count_tree(rounds)
    assert tree.hits.tolist() == [[2, 0], [0, 2], [0, 2]]
    assert tree.nodes.tolist() == [2, 2, 4]


def test_counts_by_the_order_below_the_parent():
    """A selector that prefers 8 below 5, 7 below 6, 9 below 7 and 4 below 8."""
    pairs = np.log([[[0.6, 0.3], [0.6, 0.3]], [[0.2, 0.7], [0.5, 0.4]], [[0.9, 0.1], [0.1, 0.9]]])

    def selected(tokens):
        plain = hand_made(tokens)
        return plain._replace(trace=plain.trace._replace(pair_scores=pairs.astype(np.float32)))

    assert ranks_of(selected([5, 8, 2])).tolist() == [0, 0, NO_RANK]
    assert ranks_of(selected([6, 8, 4])).tolist() == [1, 1, 0]
    tree = count_tree([selected([5, 8, 2])])
    assert tree.hits.tolist() == [[1, 0], [1, 0], [0, 1]]
    assert tree.nodes.tolist() == [1, 1, 2]


@pytest.fixture(scope="module")
def work():
    """Two prompts, of the second of which it is said that it is mathematics."""
    prompts = [text_prompt(f"p:{i}") for i in range(2)]
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size - 1, (2, 9)).tolist()
    return Workload(prompts, ids, PARAMS, [None, {"task": "math"}])


@pytest.fixture(scope="module")
def rounds(pair, work):
    return trace_requests(pair, work, TreeSettings(16, width=3), implementation="xla")


def decode_only(patch, pair, work):
    """Commands decode this work with this pair, whatever they are told."""
    patch.setattr(profile_command, "load_pair", lambda *_: pair)
    patch.setattr(profile_command, "make_workloads", lambda *_: {0.0: work})


@pytest.mark.wide
def test_the_command_writes_a_report_and_a_picture(pair, work, report_of, monkeypatch):
    decode_only(monkeypatch, pair, work)
    small = ["--num-prompts", "2", "--max-tokens", "16", *SETTINGS, "--least-nodes", "1"]
    table = report_of("profile", " ".join(small))
    assert len(Profile.parse(table).depth_rank_accept[0]) == 3
    meta = table["meta"]
    assert meta["rounds"] == sum(meta["rounds_by_class"].values()) == meta["nodes"][0]
    assert meta["dtype"] == "float32"
    assert meta["arguments"]["target"] == "demo"
    assert meta["prompt_tokens"] == [9, 9]
    for option in ("--num-prompts 2", "--skip-prompts 0", "--max-tokens 16"):
        assert option in meta["command"]


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("profile", ["--least-share", "2"], "--least-share must lie in 0..1, not 2.0"),
        ("acceptance", ["--candidates", "7", "0"], "--candidates must be at least 1, not 0"),
        ("acceptance", ["--algorithms", "chain", "auto"], "--algorithms auto: auto chooses budgets"),
        ("profile", ["--budget", "1"], "--budget must be in 2..256 (nodes, root and a draft included)"),
        ("profile", ["--temperature", "nan"], "temperature must be 0 or lie in [1e-30, 1e+30], not nan"),
    ],
)
def test_bad_settings_are_one_line(refusal, monkeypatch, command, arguments, message):
    monkeypatch.setattr(profile_command, "load_pair", None)  # nothing is loaded for them
    assert refusal(command, *arguments).startswith(message)


@pytest.mark.wide
def test_too_few_rounds_make_no_profile(pair, work, refusal, monkeypatch):
    decode_only(monkeypatch, pair, work)
    said = refusal("profile", *SETTINGS, "--least-nodes", "500")
    assert re.match(r"\d+ rounds are too few for a table with --least-nodes 500; take more", said)


def test_an_unreadable_prompt_is_named(tmp_path, refusal):
    (tmp_path / "prompts.jsonl").write_text('{"text": "x"}\n{"text": \n')
    assert "prompts.jsonl:2: " in refusal("profile", "--prompts", "{}/prompts.jsonl")
