"""``python -m bench serve``: sets, figures, and a server on real sockets."""

import numpy as np
import pytest

from bench.load.arrivals import Lengths
from bench.serve.clients import Answer, Clients
from bench.serve.figures import notes_of, parse_bounds, steady, summed_up
from bench.serve.servers import options_of
from bench.serve.sets import ALIKE, LATER, TURNS, Asking, conversations
from jetspec_jax import AsyncLLM
from tests.serve.conftest import small_target
from tests.serve.servers import served


def fixed(name, count, prompt=8, output=5, shared=0):
    rng = np.random.default_rng(0)
    return conversations(name, count, Lengths.parse(f"{prompt}"), Lengths.parse(f"{output}"), shared, rng)


def test_sets():
    texts = [own.turns[0] for own in fixed("random", 20)]
    assert len(set(texts)) == 20
    assert {len(text.split()) for text in texts} == {8}
    alike = [own.turns[0] for own in fixed("shared", 2 * ALIKE, shared=30)]
    begins = [tuple(text.split()[:30]) for text in alike]
    assert sorted(map(begins.count, set(begins))) == [ALIKE, ALIKE]
    assert len({tuple(text.split()[30:]) for text in alike}) == 2 * ALIKE
    [several] = fixed("turns", 1)
    assert [len(turn.split()) for turn in several.turns] == [8] + [8 // LATER] * (TURNS - 1)
    assert several.max_tokens == (5,) * TURNS
    assert all(own.turns[0] for own in fixed("demo", 3))


def test_requests():
    said = [" a", " b", " c"]
    body = Asking("m", temperature=0.5).body(said, 7, 3)
    assert (body["prompt"], body["model"], body["max_tokens"], body["seed"]) == (" a b c", "m", 7, 3)
    assert body["ignore_eos"]
    assert body["stream_options"] == {"include_usage": True}
    body = Asking(endpoint="chat", ignore_eos=False).body(said, 7, 3)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"]
    assert not {"ignore_eos", "model"} & set(body)


def test_figures_of_known_answers():
    answers = [
        Answer(1.0, 200, first=1.0 + wait, last=1.0 + wait + 1.0, tokens=11, prompt_tokens=20, done=True)
        for wait in (0.1, 0.2, 0.9)
    ]
    answers.append(Answer(1.0, 429, retry_after="1", error="full"))
    answers.append(Answer(1.0, 200, first=1.1, error="the stream ended without [DONE]"))
    found = summed_up(answers, 4.0, {"ttft": 500.0, "tpot": 101.0})
    assert (found["answered"], found["refused"], found["refused_with_retry_after"], found["failed"]) == (
        3,
        1,
        1,
        1,
    )
    assert found["tokens_per_second"] == pytest.approx(33 / 4)
    assert found["goodput_requests_per_second"] == pytest.approx(2 / 4)
    assert found["ttft"]["p50_ms"] == pytest.approx(200)
    assert found["tpot"]["p99_ms"] == pytest.approx(100)
    assert found["e2e"]["max_ms"] == pytest.approx(1900)
    # Of those sent at 0, 1, 2, 3 and 4 three ended after 1 and before 4.
    line = [Answer(at, last=at + 1.5, tokens=30) for at in range(5)]
    assert steady(line, line) == pytest.approx(30 * 3 / 3)
    about = {"method": "auto", "set": "random", "bound_seconds": 3.0}
    rows = [
        {**found, **about, "concurrency": 4, "load": None, "steady_goodput_tokens_per_second": 10.0},
        {**found, **about, "concurrency": None, "load": 2.0, "steady_goodput_tokens_per_second": 9.0},
    ]
    [note] = notes_of(rows)
    assert "2 times the sustained rate: goodput while requests arrive 90% of the peak" in note
    assert "1 of 5 refused, 1 with Retry-After" in note


def test_an_event_may_come_in_any_form():
    answer = Answer(0.0)
    for event in (b": ping", b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}'):
        answer.add_event(event, 1.0)
    assert answer.first is None
    answer.add_event(b'data: {"choices":[{"delta":{"content":"x"}}]}', 2.0)
    answer.add_event(b'data: {"choices":[],"usage":{"completion_tokens":1,"prompt_tokens":4}}', 3.0)
    assert not answer.whole
    answer.add_event(b"data: [DONE]", 3.0)
    assert answer.whole
    assert (answer.first, answer.last, answer.text, answer.tokens, answer.per_token) == (
        2.0,
        2.0,
        "x",
        1,
        None,
    )
    answer.add_event(b'data: {"error":{"message":"lost"}}', 4.0)
    assert (answer.error, answer.whole) == ("lost", False)


@pytest.mark.wide
def test_overload_and_a_whole_report(report_of):
    """Twelve come at once to one slot and two places: the others are told when to come again."""
    llm = AsyncLLM(small_target(), budget=1, max_slots=1, max_waiting=2, capacity=512)
    with served(llm) as server:
        clients = Clients(server.url, Asking())
        answers, _ = clients.serve(fixed("random", 12, output=300), rate=1000.0)
        refused = [own for own in answers if own.status == 429]
        whole = [own for own in answers if own.whole]
        assert len(whole) + len(refused) == 12
        assert len(refused) >= 6
        assert all(own.retry_after == "1" for own in refused)
        assert {own.tokens for own in whole} == {300}
        report = report_of(
            "serve",
            f"--url {server.url} --sets turns demo --concurrency 1 --loads 0.5 --num-prompts 2 "
            "--prompt-tokens 8 --output-tokens 4 --goodput e2e:60000",
        )
    rows = report["rows"]
    assert [(row["set"], row["concurrency"], row["load"]) for row in rows] == [
        ("turns", 1, None),
        ("turns", None, 0.5),
        ("demo", 1, None),
        ("demo", None, 0.5),
    ]
    assert [row["answered"] for row in rows] == [2 * TURNS, 2 * TURNS, 2, 2]
    assert all(row["failed"] == row["refused"] == 0 for row in rows)
    assert all(row["goodput_requests_per_second"] == row["requests_per_second"] for row in rows)
    assert all(row["output_tokens"] == 4 for row in rows)
    assert rows[1]["rate"] == pytest.approx(0.5 * rows[0]["conversations_per_second"])


def test_methods():
    assert options_of("plain", 64) == ["--budget", "1"]
    assert options_of("tree 32", 64)[:2] == ["--budget", "32"]
    assert options_of("auto", 64) == ["--budget", "64", "--algorithm", "auto"]
    assert parse_bounds(["ttft:500", "e2e:9.5"]) == {"ttft": 500.0, "e2e": 9.5}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--sets", "sharegpt"], "--sets must be one of random, shared, turns, demo"),
        (["--methods", "tree"], 'methods are auto, chain, plain, or a tree like "tree 64"'),
        (["--endpoint", "responses"], "--endpoint must be one of completions, chat"),
        (
            ["--url", "http://127.0.0.1:9", "--num-prompts", "1"],
            "the server answered none of 1 requests: ConnectError",
        ),
    ],
)
def test_what_cannot_be(refusal, words, said):
    assert said in refusal("serve", *words)
