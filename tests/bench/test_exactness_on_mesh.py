"""``python -m bench exactness`` where devices share the pair, and whether they agree on what steers it."""

import json

import pytest

from bench.__main__ import main
from bench.exactness import command as exactness
from bench.exactness import decoding
from jetspec_jax import SamplingParams
from tests.bench.conftest import random_workloads
from tests.decode.tiny import save_tiny_pair
from tests.meshes import need_devices

pytestmark = pytest.mark.wide

SMALL = "--dtypes float32 --num-prompts 2 --max-tokens 8 --budgets 16 --batch 2 --tensor-parallel-size 2"
FILTERS = {"top_k": 20, "top_p": 0.9, "min_p": 0.01}


@pytest.fixture
def run(tmp_path, monkeypatch):
    need_devices(2)
    monkeypatch.setattr(exactness, "make_workloads", random_workloads)
    target, head = save_tiny_pair(tmp_path / "pair")
    path = tmp_path / "ledger.json"

    def call(*words):
        pair = ["--target", str(target), "--draft-head", str(head), "--json", str(path)]
        return main(["exactness", *SMALL.split(), *pair, *words]), json.loads(path.read_text())

    return call


def test_two_devices_against_themselves_and_against_one(run, monkeypatch):
    asked = []

    def decode(*arguments, **settings):
        asked.append(arguments[2].params)
        return decoding.decode(*arguments, **settings)

    monkeypatch.setattr(exactness, "decode", decode)
    code, report = run("--one-device", "--top-k", "20", "--top-p", "0.9", "--min-p", "0.01")
    assert code == 0
    assert [(row["T"], row["method"], row["tokens"]) for row in report["rows"]] == [
        (0.0, "plain, one device", 16),
        (0.0, "top_nodes 16", 16),
        (1.0, "plain, one device", 16),
        (1.0, "top_nodes 16", 16),
    ]
    sampled = [SamplingParams(1.0, seed=i, max_tokens=8, **FILTERS) for i in range(2)]
    greedy = [SamplingParams(0.0, seed=i, max_tokens=8) for i in range(2)]
    assert asked == [greedy] * 3 + [sampled] * 3
    assert report["devices"] == 2
    seen = report["agreement"]
    assert (seen["devices"], seen["unequal"]) == (2, [])
    assert seen["arrays"] > 16
    assert seen["launches"] >= 4
    assert "on 2 devices, bit for bit, after " in report["notes"][-1]


def test_devices_that_differ_are_the_exit_code(run, monkeypatch):
    monkeypatch.setattr(decoding, "unequal", lambda _: [".anchors"])
    code, report = run("--temperatures", "0")
    assert code == 1
    assert report["agreement"]["unequal"] == [".anchors"]
    assert report["notes"][-1].endswith("these differed: .anchors.")
    assert [row["mistakes"] for row in report["rows"]] == [0]


def test_one_device_is_compared_with_several_alone(refusal):
    assert "goes with --tensor-parallel-size" in refusal("exactness", "--one-device")
