"""``python -m bench profile`` and ``diagnose``: counts against plain loops, sums against plain forwards."""

import json
import re

import jax.numpy as jnp
import numpy as np
import pytest

from bench.__main__ import main
from bench.acceptance import rounds as begin_rounds
from bench.acceptance.counts import (
    NO_RANK,
    TracedRound,
    count_accepted,
    count_reached,
    count_tree,
    ranks_of,
    trace_requests,
)
from bench.acceptance.diagnose import branches_of, faithfulness
from bench.acceptance.profile import classes_of, tables
from bench.common.workload import Workload
from jetspec_jax import SamplingParams, draft_logits, generate, generate_tree, logits
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.inspect.trace import RoundTrace
from jetspec_jax.tree import Candidates, Profile, Routing, get_algorithm
from jetspec_jax.tree.routing import CLASSES
from tests.bench.conftest import text_prompt
from tests.decode.tiny import TINY

# The same in all tests, so that they share the programs that decode.
SETTINGS = ["--budget", "16", "--width", "3", "--implementation", "xla"]
PARAMS = [SamplingParams(max_tokens=16, ignore_eos=True, temperature=t, seed=5) for t in (0.0, 1.0)]


def hand_made(tokens):
    """Candidates [5 6], [7 8], [9 4]; a tree of 5 below the anchor 1, then 7 and 8; 5 and 8 are accepted."""
    int32 = np.int32
    return TracedRound(
        0,
        None,
        RoundTrace(
            start=3,
            candidate_tokens=np.array([[5, 6], [7, 8], [9, 4]], int32),
            candidate_log_probs=np.log(np.array([[0.6, 0.3], [0.5, 0.4], [0.9, 0.1]], np.float32)),
            tokens=np.array([1, 5, 7, 8], int32),
            parents=np.array([-1, 0, 1, 1], int32),
            depths=np.array([0, 1, 2, 2], int32),
            scores=np.zeros(4, np.float32),
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
    accepted = count_accepted(rounds)
    assert accepted.hits.tolist() == [[2, 0], [0, 2], [0, 0]]
    assert accepted.nodes.tolist() == [2, 2, 2]


def test_counts_by_the_order_below_the_parent():
    """A selector that prefers 8 below 5, 7 below 6, 9 below 7 and 4 below 8."""
    pairs = np.log([[[0.6, 0.3], [0.6, 0.3]], [[0.2, 0.7], [0.5, 0.4]], [[0.9, 0.1], [0.1, 0.9]]])

    def selected(tokens):
        plain = hand_made(tokens)
        return plain._replace(trace=plain.trace._replace(pair_log_probs=pairs.astype(np.float32)))

    assert ranks_of(selected([5, 8, 2])).tolist() == [0, 0, NO_RANK]
    assert ranks_of(selected([6, 8, 4])).tolist() == [1, 1, 0]
    tree, accepted = (count([selected([5, 8, 2])]) for count in (count_tree, count_accepted))
    assert tree.hits.tolist() == [[1, 0], [1, 0], [0, 1]]
    assert tree.nodes.tolist() == [1, 1, 2]
    assert accepted.hits.tolist() == [[1, 0], [1, 0], [0, 0]]


@pytest.fixture(scope="module")
def work():
    """Two prompts, of the second of which it is said that it is mathematics."""
    prompts = [text_prompt(f"p:{i}") for i in range(2)]
    ids = np.random.default_rng(0).integers(0, TINY.vocab_size - 1, (2, 9)).tolist()
    return Workload(prompts, ids, PARAMS, [None, {"task": "math"}])


@pytest.fixture(scope="module")
def texts(pair, work):
    """The prompts with plain decoding's tokens."""
    completions = generate(pair.target, work.ids, PARAMS)
    return [[*ids, *own.token_ids] for ids, own in zip(work.ids, completions, strict=True)]


@pytest.fixture(scope="module")
def rounds(pair, work):
    return trace_requests(pair, work, TreeSettings(16, width=3), implementation="xla")


@pytest.mark.wide
def test_counts_equal_a_plain_loop_over_plain_decoding(texts, rounds):
    hits, nodes = {}, {}
    for one in rounds:
        for depth, row in enumerate(one.trace.candidate_tokens.tolist()):
            place = one.trace.start + 1 + depth
            if place >= len(texts[one.prompt]):
                break
            token = texts[one.prompt][place]
            nodes[depth] = nodes.get(depth, 0) + 1
            if token not in row:
                break
            hits[depth, row.index(token)] = hits.get((depth, row.index(token)), 0) + 1
    found = count_reached(rounds)
    assert {d: int(n) for d, n in enumerate(found.nodes) if n} == nodes
    assert {(int(d), int(r)): int(found.hits[d, r]) for d, r in np.argwhere(found.hits)} == hits
    # Every accepted node was reached.
    assert (count_accepted(rounds).hits <= found.hits).all()
    assert count_tree(rounds).nodes.sum() == sum((one.trace.depths < 7).sum() for one in rounds)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["depth_rank_histogram", "class_histogram"])
@pytest.mark.filterwarnings("ignore:routing is deprecated")
def test_a_profile_is_what_the_algorithms_read(pair, work, texts, rounds, name):
    made = json.loads(json.dumps(tables(rounds, least_share=0.3)))
    classes = classes_of(rounds)
    assert set(made["per_class_histograms"]) == {CLASSES[i] for i in classes}
    # Of the second prompt it is said, of the first it is felt: a random head is sure of nothing.
    assert [CLASSES[i] for i in classes] == [
        ("uncertain_task", "decisive_task")[one.prompt] for one in rounds
    ]
    parsed = Profile.parse(made)
    assert parsed.depth_rank_accept == tuple(map(tuple, count_reached(rounds).shares()))
    for row in made["per_class_histograms"]["uncertain_task"]:
        assert all(share == 0 or share >= 0.3 for share in row)
    algorithm = get_algorithm(name, profile=made)
    shape = {"budget": 16, "width": 3, "routing": work.routing}
    trees = generate_tree(pair.target, pair.head, work.ids, PARAMS, algorithm=algorithm, **shape)
    assert [[*ids, *own.token_ids] for ids, own in zip(work.ids, trees, strict=True)] == texts
    first = rounds[0].trace
    candidates = Candidates(
        *(jnp.asarray(own)[None] for own in (first.candidate_tokens, first.candidate_log_probs)),
        entropies=jnp.zeros((1, 7), jnp.float32),
    )
    caps = np.asarray(algorithm.plan(candidates, Routing.unsaid(1)).caps)[0]
    if name == "depth_rank_histogram":
        measured = [max(sum(x >= 0.02 for x in row), 1) for row in made["depth_rank_accept"]]
    else:
        table = made["per_class_histograms"][CLASSES[classes[0]]]
        measured = [max([1, *(rank + 1 for rank, x in enumerate(row) if x > 0)]) for row in table]
    assert caps[: len(measured)].tolist() == measured
    assert min(measured) < 3


@pytest.mark.wide
def test_branches_are_sums_of_plain_forwards(pair, work, texts):
    chains = trace_requests(pair, work, TreeSettings(8, width=3, algorithm="chain"), implementation="xla")
    found = branches_of(chains)
    assert found.draft.shape == (len(chains), 7)
    for i, one in enumerate(chains):
        row = [*texts[one.prompt][: one.trace.start + 1], *one.trace.tokens[1:].tolist()]
        padded = np.zeros((1, 48), np.int32)
        padded[0, : len(row)] = row
        scores = np.asarray(logits(pair.target, padded))[0].astype(np.float64)
        log_probs = scores - np.log(np.sum(np.exp(scores), axis=1, keepdims=True))
        places = np.arange(one.trace.start, one.trace.start + 7)
        own = log_probs[places, one.trace.tokens[1:]]
        np.testing.assert_allclose(found.target[i], np.cumsum(own), atol=1e-4)
    first = chains[0].trace
    drafts = np.asarray(draft_logits(pair.target, pair.head, [texts[0][: first.start + 1]]))[0]
    best = drafts.max(axis=1) - np.log(np.sum(np.exp(drafts.astype(np.float64)), axis=1))
    np.testing.assert_allclose(found.draft[0], np.cumsum(best), atol=1e-4)
    rows = faithfulness(found)
    assert [row["depth"] for row in rows] == list(range(1, 8))
    assert rows[-1]["faithful"] == np.mean(np.abs(found.draft[:, -1] - found.target[:, -1]) <= 5)
    assert rows[2]["50 %"] == pytest.approx(np.median(found.draft[:, 2] - found.target[:, 2]))


@pytest.mark.wide
def test_branches_are_read_off_chains_only(rounds):
    with pytest.raises(ValueError, match="chains of 7 nodes"):
        branches_of(rounds)


def decode_only(patch, pair, work):
    """Commands decode this work with this pair, whatever they are told."""
    patch.setattr(begin_rounds, "load_pair", lambda *_: pair)
    patch.setattr(begin_rounds, "make_workloads", lambda *_: {0.0: work})


@pytest.fixture(scope="module")
def folder(pair, work, tmp_path_factory):
    """Reports of both commands on the tiny pair."""
    folder = tmp_path_factory.mktemp("reports")
    small = ["--num-prompts", "2", "--max-tokens", "16", *SETTINGS]
    with pytest.MonkeyPatch.context() as patch:
        decode_only(patch, pair, work)
        for name, more in ("profile", ["--least-nodes", "1"]), ("diagnose", ["--temperature", "1"]):
            assert main([name, *small, *more, "--json", str(folder / f"{name}.json")]) == 0
    return folder


@pytest.mark.wide
def test_the_commands_write_reports_and_pictures(folder):
    table, report = (json.loads((folder / f"{name}.json").read_text()) for name in ("profile", "diagnose"))
    assert len(Profile.parse(table).depth_rank_accept[0]) == 3
    meta = table["meta"]
    assert meta["rounds"] == sum(meta["rounds_by_class"].values()) == meta["nodes"][0]
    trees = report["committed_per_round"]["top_nodes 16"]
    assert report["accepted_by_depth_and_rank"]["rounds"] == sum(trees) > 10
    assert len(report["faithfulness"]) == report["shapes"]["block_size"] - 1
    assert len(report["branches"]["draft"]) == report["faithfulness"][0]["branches"]
    for own in (meta, report):
        assert own["device"]
        assert own["jax"]
        assert own["dtype"] == "float32"
        assert own["arguments"]["target"] == "demo"
        assert own["prompt_tokens"] == [9, 9]
        for option in ("--num-prompts 2", "--skip-prompts 0", "--max-tokens 16"):
            assert option in own["command"]
    for name in ("profile", "diagnose"):
        assert (folder / f"{name}.png").stat().st_size > 20_000


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("profile", ["--least-share", "2"], "--least-share must lie in 0..1, not 2.0"),
        ("profile", ["--least-nodes", "0"], "--least-nodes must be at least 1, not 0"),
        ("acceptance", ["--candidates", "7", "0"], "--candidates must be at least 1, not 0"),
        ("acceptance", ["--algorithms", "chain", "auto"], "--algorithms auto: auto chooses budgets"),
        ("profile", ["--algorithm", "best"], "unknown tree algorithm 'best'"),
        ("diagnose", ["--algorithm", "auto"], "--algorithm auto: auto chooses budgets"),
        ("diagnose", ["--budget", "1"], "--budget must be in 2..256 (nodes, root and a draft included)"),
        ("profile", ["--budget", "257"], "--budget must be in 2..256"),
        ("diagnose", ["--temperature", "nan"], "temperature must be 0 or lie in [1e-30, 1e+30], not nan"),
    ],
)
def test_bad_settings_are_one_line(refusal, monkeypatch, command, arguments, message):
    monkeypatch.setattr(begin_rounds, "load_pair", None)  # nothing is loaded for them
    assert refusal(command, *arguments).startswith(message)


@pytest.mark.wide
def test_too_few_rounds_make_no_profile(pair, work, refusal, monkeypatch):
    decode_only(monkeypatch, pair, work)
    said = refusal("profile", *SETTINGS, "--least-nodes", "500")
    assert re.match(r"\d+ rounds are too few for a table with --least-nodes 500; take more", said)


def test_an_unreadable_prompt_is_named(tmp_path, refusal):
    (tmp_path / "prompts.jsonl").write_text('{"text": "x"}\n{"text": \n')
    assert "prompts.jsonl:2: " in refusal("profile", "--prompts", "{}/prompts.jsonl")
