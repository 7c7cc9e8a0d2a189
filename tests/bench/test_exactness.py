"""``python -m bench exactness``: what it lists, what it calls a mistake, and what it counts."""

import dataclasses
import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.common.workload import Workload
from bench.exactness import command as exactness
from bench.exactness.decoding import decode
from bench.exactness.ledger import notes_of, tables_of, total
from jetspec_jax import Completion, SamplingParams
from jetspec_jax.inspect.exactness import TIE_GAP
from tests.bench.conftest import random_workloads, text_prompt
from tests.decode.tiny import TINY

SMALL = ["--num-prompts", "2", "--max-tokens", "8", "--budgets", "16", "--batch", "2"]


def run(path, *arguments):
    code = main(["exactness", *SMALL, *arguments, "--json", str(path)])
    return code, json.loads(path.read_text())


@pytest.fixture(autouse=True)
def tiny_pair(pair, monkeypatch):
    monkeypatch.setattr(exactness, "load_pair", lambda *_: pair)
    monkeypatch.setattr(exactness, "make_workloads", random_workloads)


@pytest.fixture
def broken(monkeypatch):
    """Trees whose second prompt gets a wrong token at position 3."""

    def wrong(target, head, *arguments, **settings):
        first, second = decode(target, head, *arguments, **settings)
        tokens = list(second.token_ids)
        if head is not None:
            tokens[3] = (tokens[3] + 1) % TINY.vocab_size
        return [first, dataclasses.replace(second, token_ids=tokens)]

    monkeypatch.setattr(exactness, "decode", wrong)


@pytest.mark.wide
def test_a_right_tree_has_an_empty_ledger(tmp_path):
    path = tmp_path / "profile.json"
    measured = {"prompts": "demo", "skip_prompts": 1, "num_prompts": 5}
    path.write_text(json.dumps({"depth_rank_accept": [[0.5]], "meta": {"arguments": measured}}))
    words = ["--dtypes", "float32", "--algorithms", "depth_rank_histogram", "--profile", str(path)]
    code, report = run(tmp_path / "out" / "ledger.json", *words)
    assert code == 0
    assert report["profile_prompts"] == measured
    assert "this run decodes 1 of them" in report["notes"][-1]
    assert report["divergences"] == []
    assert [(row["T"], row["prompts"], row["tokens"], row["mistakes"]) for row in report["rows"]] == [
        (0.0, 2, 16, 0),
        (1.0, 2, 16, 0),
    ]
    assert all(1 <= row["tau"] <= 5 for row in report["rows"])
    assert report["device"]
    assert report["agreement"] is None
    assert report["shapes"]["vocab_size"] == TINY.vocab_size
    assert report["arguments"]["target"] == "demo"
    assert (tmp_path / "out" / "ledger.svg").stat().st_size > 10_000


@pytest.mark.wide
def test_a_mistake_is_listed_and_is_the_exit_code(tmp_path, capsys, broken, pair):
    code, report = run(tmp_path / "ledger.json", "--dtypes", "float32", "--temperatures", "0")
    assert code == 1
    [entry] = report["divergences"]
    assert (entry["prompt"], entry["position"], entry["verdict"]) == ("demo:2", 3, "mistake")
    assert entry["token"] == entry["expected"] + 1
    assert entry["expected_text"] == pair.target.tokenizer.decode([entry["expected"]])
    assert entry["behind"] >= entry["gap"] > TIE_GAP
    [row] = report["rows"]
    assert (row["tokens"], row["divergences"], row["ties"], row["mistakes"]) == (8 + 3, 1, 0, 1)
    assert row["largest_gap"] == entry["gap"]
    out = capsys.readouterr().out
    assert "MISTAKE" in out
    assert repr(entry["token_text"]) in out


@pytest.mark.wide
def test_two_equally_good_tokens_are_a_tie(tmp_path, broken, monkeypatch):
    row = np.zeros(TINY.vocab_size, np.float32)
    monkeypatch.setattr("jetspec_jax.inspect.exactness.perturbed_logits", lambda *_: row)
    code, report = run(tmp_path / "ledger.json", "--dtypes", "float32", "--temperatures", "0")
    assert code == 0
    assert [(entry["verdict"], entry["gap"]) for entry in report["divergences"]] == [("tie", 0.0)]
    assert (report["rows"][0]["ties"], report["rows"][0]["mistakes"]) == (1, 0)


@pytest.mark.wide
def test_bfloat16_is_listed_and_not_judged(tmp_path, broken):
    code, report = run(tmp_path / "ledger.json", "--dtypes", "bfloat16", "--temperatures", "0")
    assert code == 0
    assert [entry["verdict"] for entry in report["divergences"]] == [None]
    assert report["rows"][0]["mistakes"] is None


def entry_of(verdict, gap, prompt="p:0", text="[/red]:smile:"):
    return {
        "dtype": "bfloat16" if verdict is None else "float32",
        "T": 0.0,
        "method": "accum_logp 64",
        "prompt": prompt,
        "position": 5,
        "token": 1,
        "token_text": text,
        "expected": None,
        "expected_text": None,
        "gap": gap,
        "behind": gap,
        "verdict": verdict,
    }


def test_the_screen_shows_mistakes_first_and_tokens_as_they_are():
    entries = [entry_of(None, 0.5)] * 30 + [entry_of("tie", 1e-6), entry_of("mistake", 1e-3)]
    [(heading, rows), _] = tables_of("ledger", [], entries)
    assert heading == "First differences: 20 of 32"
    assert [row[""] for row in rows[:3]] == ["MISTAKE", "TIE", ""]
    assert (rows[0]["token"], rows[0]["plain"]) == ("1 '[/red]:smile:'", "nothing")


@pytest.mark.wide
def test_totals_count_up_to_the_first_difference():
    outputs = [Completion("", list(range(10)), "length", [2, 4], [16, 16])] * 3
    prompts = [text_prompt(f"p:{i}") for i in range(3)]
    work = Workload(prompts, [[1]] * 3, [SamplingParams()] * 3, [None] * 3)
    row = total(work, outputs, [entry_of("tie", 1e-6, prompt="p:1")], judged=True)
    assert row == {
        "prompts": 3,
        "tokens": 25,
        "tau": 3.0,
        "divergences": 1,
        "ties": 1,
        "mistakes": 0,
        "largest_gap": 1e-6,
    }
    rows = [{"dtype": "float32", "T": 0.0, "method": "a", **row}]
    rows.append({**rows[0], "dtype": "bfloat16", "mistakes": None})
    one, two = notes_of(rows)
    assert "25 tokens compared, 1 ties" in one
    assert "1 of 3 outputs differ" in two
