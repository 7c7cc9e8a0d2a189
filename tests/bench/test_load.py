"""``python -m bench load``: draws, and a run of a tiny shape."""

import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.common.methods import Method
from bench.common.pair import Pair
from bench.load import command, traffic, waits
from bench.load.arrivals import Lengths, poisson
from jetspec_jax import SamplingParams
from jetspec_jax.decode.settings import TreeSettings
from tests.decode.tiny import TINY, random_target


def test_lengths():
    rng = np.random.default_rng(0)
    assert Lengths.parse("128").draw(3, rng, 100) == [100, 100, 100]
    drawn = Lengths.parse("uniform:3:9").draw(500, rng, 1000)
    assert (min(drawn), max(drawn)) == (3, 9)
    drawn = Lengths.parse("lognormal:100:0.5").draw(2000, rng, 10_000)
    assert np.median(drawn) == pytest.approx(100, rel=0.05)
    assert np.log(drawn).std() == pytest.approx(0.5, rel=0.05)
    arrivals = poisson(4.0, 4000, rng)
    assert arrivals[-1] == pytest.approx(1000, rel=0.05)
    for text in ("0", "x", "uniform:3", "uniform:9:3", "normal:3:4", "lognormal:3:-1", "lognormal:inf:1"):
        with pytest.raises(ValueError, match="lengths are N, uniform:LEAST:MOST"):
            Lengths.parse(text)
    assert waits.parse_prompts("8x1024") == (8, 1024)
    with pytest.raises(ValueError, match="prompts are LENGTH or COUNTxLENGTH"):
        waits.parse_prompts("8x")


SMALL = (
    "--shape tiny --prompts 100 2x30 --long-prompt 150 --shared-tokens 128 --slots 4 --host-slots 1 4 "
    "--buckets-up-to 16 --least-nodes 16 --count 2 --repeats 1 --concurrency 2 "
    "--rates 50 --num-prompts 3 --prompt-tokens 9 --output-tokens uniform:2:4 --compilation-cache off"
)


@pytest.mark.wide
def test_all_parts_of_a_tiny_shape(report_of):
    report = report_of("load", f"{SMALL} --parts prefill ttft gaps shared host traffic")
    parts = {name: part["result"] for name, part in report["parts"].items()}
    assert [(row["prompts"], row["length"]) for row in parts["prefill"]] == [(1, 100), (2, 30)]
    assert all(row["tokens_per_second"] > 0 for row in parts["prefill"])
    assert 0 < parts["ttft"]["first_token"]["p50_ms"] <= parts["ttft"]["first_token"]["max_ms"]
    assert parts["gaps"]["gaps"]["max_ms"] > 0
    assert parts["shared"]["prefix_tokens"] == 128
    assert [row["slots"] for row in parts["host"]] == [1, 4]
    methods = ["plain", "chain", "auto", "tree 16"]
    assert [(row["method"], row["concurrency"], row["rate"]) for row in parts["traffic"]] == [
        *((method, 2, None) for method in methods),
        *((method, None, 50.0) for method in methods),
    ]
    assert len({row["tokens"] for row in parts["traffic"]}) == 1
    assert report["tokens_checked"] == 2 * 48  # plainly, and with trees


@pytest.mark.wide
def test_outputs_that_differ_are_an_error(pair, monkeypatch):
    prompts = [([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))]
    expected = traffic.check_outputs(pair, [], prompts, 64)
    assert expected == 3
    method = Method("plain again", None, TreeSettings(1))
    load = traffic.Load

    def wrong(own, settings, **plan):
        other = Pair(random_target(TINY, 9), own.head) if settings is method.settings else own
        return load(other, settings, **plan)

    monkeypatch.setattr(traffic, "Load", wrong)
    with pytest.raises(RuntimeError, match="plain again does not give plain decoding's tokens"):
        traffic.check_outputs(pair, [method], prompts, 64)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parts", "prefil"], "--parts must be one of prefill, ttft"),
        (["--shape", "tiny", "--long-prompt", "4000"], "need 5024 tokens, and tiny has a context of 4096"),
        (["--slots", "4", "--host-slots", "8"], "--host-slots 8 is more than --slots 4"),
        (["--budgets", "1"], "--budgets must be at least 2"),
        (["--prompts", "9x100"], "at most 8 prompts can arrive together"),
    ],
)
def test_what_cannot_be(refusal, words, said):
    assert said in refusal("load", *words)


def test_a_report_that_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    measured = []

    def host(self, step):
        measured.append("host")
        return [{"slots": 1, "host_ms": 0.1}]

    monkeypatch.setattr(command.Measured, "host", host)
    monkeypatch.setattr(command, "check", lambda _: 7)
    words = ["load", "--shape", "tiny", "--parts", "host", "--json", str(path), "--compilation-cache", "off"]

    for _ in range(2):
        assert main([*words, "--resume"]) == 0
    assert measured == ["host"]
    assert json.loads(path.read_text())["tokens_checked"] == 7
    assert main(["load", "--shape", "qwen3-0.6b", *words[3:], "--resume"]) == 2
    assert main([*words, "--target", "smollm2", "--resume"]) == 2
