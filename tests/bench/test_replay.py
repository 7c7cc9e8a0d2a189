"""Rounds replayed along plain decoding's texts are the rounds of decoding with trees."""

import jax.numpy as jnp
import numpy as np
import pytest

from bench.acceptance import command, replay
from bench.acceptance.rejections import anchors_of, rejections
from bench.acceptance.replay import accepted_along, rounds_along
from bench.common.workload import Workload
from bench.exactness.decoding import Agreement, decode
from jetspec_jax import SamplingParams
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.tree import Candidates, algorithm_of
from tests.bench.conftest import random_workloads, text_prompt
from tests.decode.tiny import TINY
from train.head.replay import Drafts, draft_along, write_texts

pytestmark = pytest.mark.wide


@pytest.fixture(scope="module")
def work(pair):
    """Prompts of different lengths, greedy and sampled; one stops at an end of text, one at a token."""
    rng = np.random.default_rng(3)
    ids = [rng.integers(0, TINY.vocab_size - 1, count).tolist() for count in (5, 9, 12)]
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, max_tokens=13),
        SamplingParams(temperature=1.0, seed=2, max_tokens=16, stop_token_ids=list(range(0, 64, 9))),
    ]
    return Workload([text_prompt(f"p:{i}") for i in range(3)], ids, params, [None, {"task": "math"}, None])


@pytest.fixture(scope="module")
def drafts(pair, work):
    requests = work.ids, work.params, work.routing
    texts = write_texts(pair.target, pair.head.config.depth, *requests, batch=3, implementation="xla")
    return draft_along(*pair, texts, 5, implementation="xla")


@pytest.mark.parametrize(
    ("name", "candidates", "budget"), [("top_nodes", 3, 16), ("top_nodes", 3, 9), ("task_router", 5, 12)]
)
def test_the_rounds_are_those_of_decoding(pair, work, drafts, monkeypatch, name, candidates, budget):
    monkeypatch.setattr(replay, "GROWN", 16)  # less than all anchors, and no divisor of their number
    accepted = accepted_along(drafts, algorithm_of(name), candidates, (budget, 16))
    settings = TreeSettings(budget, algorithm=name, candidates=candidates)
    served = {"max_slots": 3, "implementation": "xla", "agreement": Agreement()}
    trees = decode(pair.target, pair.head, work, settings, **served)
    assert rounds_along(accepted[:, 0], drafts.counts) == [own.accept_lengths for own in trees]
    assert drafts.counts == [len(own.token_ids) for own in trees]
    assert accepted.max() > 0


def test_rounds_of_a_hand_made_text():
    accepted = np.array([1, 0, 2, 0, 0, 0, 9, 0, 3])
    assert rounds_along(accepted, [6, 1, 2]) == [[2, 3, 1], [10], [1, 4]]


def test_anchors_of_hand_made_rounds():
    assert anchors_of([[2, 3, 1], [10], [1, 4]], [6, 1, 2]).tolist() == [0, 2, 5, 6, 7, 8]


def test_rejections_of_hand_made_rounds():
    tokens = jnp.array([[[5, 6, 2], [7, 8, 2], [9, 4, 2]]] * 3, jnp.int32)
    entropies = jnp.array([[0.1, 0.5, 5.0]] * 3)
    following = np.array([[5, 8, 2], [6, 1, 4], [5, 7, 4]], np.int32)
    drafts = Drafts(Candidates(tokens, jnp.zeros_like(tokens, float), entropies), following, None, [3])
    # Of two candidates, the first anchor's third row lacks 2; the second tree lacks 6; the third accepts all.
    found = rejections(drafts, 2, np.array([2, 0, 3]), np.arange(3))
    assert found == {
        "by_depth": [[0, 1], [0, 0], [1, 0]],
        "by_entropy": [[0, 1], [0, 0], [0, 0], [0, 0], [1, 0]],
        "whole": 1,
    }


def test_the_command_writes_a_report_and_a_picture(pair, report_of, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(command, "load_pair", lambda *_: pair)
    monkeypatch.setattr(command, "read_head", lambda *_: pair.head)
    monkeypatch.setattr(command, "make_workloads", random_workloads)
    words = "--num-prompts 2 --max-tokens 12 --budgets 16 9 --candidates 5 3 --algorithms top_nodes chain"
    words += " --other-head again"
    words += f" --calibration {tmp_path / 'calibration.png'}"
    report = report_of("acceptance", words + " --batch 2 --implementation xla --without-noise")
    rows = {(r["temperature"], r["algorithm"], r["candidates"], r["budget"]): r for r in report["rows"]}
    assert len(rows) == 48
    assert "--other-head again" in report["command"]
    for (temperature, name, _, budget), row in rows.items():
        assert row["tau"] >= 1
        low, high = row["tau interval"]
        assert low <= row["tau"] <= high
        rejected = row["rejected"]
        for kind in ("by_depth", "by_entropy"):
            assert sum(map(sum, rejected[kind])) + rejected["whole"] == row["rounds"]
        if name == "chain":
            assert row["tau"] == rows[temperature, "chain", 3, budget]["tau"]
        if "again" in name:  # the same head, so the same rounds
            own = rows[temperature, name.removesuffix(", again"), row["candidates"], budget]
            assert (row["tau"], row["rounds"], row["gain"]) == (own["tau"], own["rounds"], 1)
        elif "noise" not in name:
            base = rows[temperature, f"{name}, without noise and scales", row["candidates"], budget]
            assert row["gain"] == pytest.approx(row["tau"] / base["tau"])
            low, high = row["gain interval"]
            assert low <= row["gain"] <= high
            assert temperature or row["gain"] == 1  # the head has no scales
    out = capsys.readouterr().out
    assert out.count("tokens per round, by budget") == 2
    assert out.count("rejected tokens by") == 4
    # A row of five candidates is said to have at most one that is chosen.
    for by_depth in report["calibration"].values():
        assert by_depth[0]["said"] > 0
        assert all(row["observed"] <= 24 for row in by_depth)
    assert len(report["calibration"]) == 2
    assert (tmp_path / "calibration.png").stat().st_size > 1000
