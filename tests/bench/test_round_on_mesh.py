"""``python -m bench round`` on two devices."""

import dataclasses

import jax
import pytest

import bench.round.command
from bench.common.collectives import LATENCY, LINK
from bench.common.floors import Ceilings
from bench.common.shapes import SHAPES, PairShape
from jetspec_jax.config import Experts
from pallas_kernels.expert_choice import RouterRule
from tests.decode.tiny import TINY, head_config
from tests.meshes import need_devices

pytestmark = pytest.mark.wide

TOP_K, COUNT = 2, 8
ROUTED = dataclasses.replace(TINY.layers[0], mlp_size=0, experts=Experts(COUNT, 24, RouterRule(TOP_K)))
MIXTURE = dataclasses.replace(TINY, model_type="qwen3_moe", layers=(TINY.layers[0], ROUTED))


@pytest.fixture(autouse=True)
def two_devices():
    need_devices(2)


@pytest.fixture(autouse=True)
def given_ceilings(monkeypatch):
    monkeypatch.setattr(bench.round.command, "measure_ceilings", lambda *_: Ceilings(1e9, 1e9, 1e9))


ROUNDS = "--budgets 8 --contexts 20 --rounds 2 --repeats 1 --dtype float32"


def test_devices_share_rounds_and_each_has_half_of_the_floor(report_of, capsys, caplog):
    report = report_of("round", f"--shape tiny --tensor-parallel-size 2 {ROUNDS}")
    assert report["devices"] == 2
    assert " --tensor-parallel-size 2 " in report["command"]
    assert " --no-phases " in report["command"]
    assert f"{report['device']}, a mesh of expert 1 x tensor 2 (devices 0, 1), JAX" in capsys.readouterr().out
    there = len(jax.devices())
    assert (f"decoding on the first 2 of {there} devices" in caplog.messages) == (there > 2)
    rows = report["rows"]
    assert [row["budget"] for row in rows] == [1, 8]
    assert all(row["phases_ms"] == {} and row["round_ms"] > 0 for row in rows)
    one = report_of("round", f"--shape tiny --no-phases {ROUNDS}")
    assert one["devices"] == 1
    for row, whole in zip(rows, one["rows"], strict=True):
        assert row["floor_ms"] == pytest.approx(whole["floor_ms"] / 2)
        assert row["tokens_per_round"] == whole["tokens_per_round"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_what_devices_exchange_follows_from_the_layers(rounds, report_of, capsys):
    words = f"--budgets 8 --contexts 20 --rounds {rounds} --repeats 1 --dtype float32"
    plain, tree = report_of("round", f"--shape tiny --tensor-parallel-size 2 {words}")["rows"]
    assert "What each device exchanges in a round" in capsys.readouterr().out
    target, head = SHAPES["tiny"]
    # Two sums for each layer and one for the embeddings, of a hidden state in float32 for each row. Each of
    # two devices sends all of its own to the other.
    of_target, of_head = (2 * own.num_layers + 1 for own in (target, head.layers))
    row = 4 * target.hidden_size
    assert plain["exchanges"]["sums"] == {"count": of_target, "bytes": of_target * row}
    sums = {"count": of_target + of_head, "bytes": (8 * of_target + head.block_size * of_head) * row}
    assert tree["exchanges"]["sums"] == sums
    # A slot's highest logit and its token.
    assert plain["exchanges"]["gathers"] == {"count": 1, "bytes": 8}
    assert tree["exchanges"]["gathers"]["count"] == 3
    for own in (plain, tree):
        parts = own["exchanges"]["sums"], own["exchanges"]["gathers"]
        count, sent = (sum(part[name] for part in parts) for name in ("count", "bytes"))
        assert own["exchanges"]["floor_ms"] == pytest.approx(1e3 * (count * LATENCY + sent / LINK))
        # The filters', which are on condition.
        assert own["exchanges"]["varying"] == 4


def test_one_device_exchanges_nothing(report_of, capsys):
    nothing = {"count": 0, "bytes": 0}
    for row in report_of("round", f"--shape tiny --no-phases {ROUNDS}")["rows"]:
        assert row["exchanges"] == {"sums": nothing, "gathers": nothing, "varying": 0, "floor_ms": 0}
    assert "each device exchanges" not in capsys.readouterr().out


def test_experts_are_counted_over_all_devices(report_of, monkeypatch):
    monkeypatch.setitem(SHAPES, "mixture", PairShape(MIXTURE, head_config(MIXTURE)))
    one, several = (
        [row["experts_touched"] for row in report_of("round", f"--shape mixture {words} {ROUNDS}")["rows"]]
        for words in ("--no-phases", "--expert-parallel-size 2")
    )
    assert one == several
    assert TOP_K == several[0] < several[1] <= COUNT
