"""``python -m bench kernel --operation matmul`` on tiny shapes: wrong kernels are caught, entries kept."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from bench.__main__ import main
from bench.common.floors import Ceilings
from bench.common.tuned import read_table
from bench.matmul import command
from bench.matmul.cases import Case, weight_bytes, work_of
from bench.matmul.check import BOUND, check_products, judge
from bench.matmul.tune import candidates, tune_products
from pallas_kernels.dispatch import Implementation
from pallas_kernels.matmul import api, reference
from pallas_kernels.matmul.config import CONFIGS, MosaicConfig
from pallas_kernels.matmul.shapes import SHAPES, MatmulShape
from pallas_kernels.mxfp4 import Mxfp4

DENSE = MatmulShape("dense", 64, 32, rows=(1, 3))
EXPERT = MatmulShape("expert", 64, 32, ("mxfp4",), rows=(3,))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(command, "SHAPES", (DENSE, EXPERT))
    monkeypatch.setattr(command, "measure_ceilings", lambda *_: Ceilings(1e9, 2e9, 1e10))


@pytest.mark.wide
def test_report(report_of):
    words = "--implementation xla --dtypes float32 --repeats 1 --seed 3"
    report = report_of("kernel", f"--operation matmul {words}")
    only = report_of("kernel", f"--operation matmul --weights fp8_rows {words}")
    assert [row["stored"] for row in only["rows"]] == ["fp8_rows", "fp8_rows"]
    cases = [(row["shape"], row["stored"], row["rows"]) for row in report["rows"]]
    assert cases == [
        *((("dense", stored, rows)) for stored in ("plain", "fp8", "fp8_rows") for rows in (1, 3)),
        ("expert", "mxfp4", 3),
    ]
    assert len(report["checks"]) == len(cases)
    assert all(check["error"] <= BOUND for check in report["checks"])
    row = report["rows"][-1]
    assert row["us"] == row["wall_us"] == row["xla_us"] > 0
    assert row["bytes"] == 64 * 32 * 17 // 32 + 2 * 3 * 96
    assert row["floor_us"] == pytest.approx(1e6 * max(row["bytes"] / 2e9, row["operations"] / 1e10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--shapes qwen3-8b", "--shapes must be one of dense, expert, not 'qwen3-8b'"),
        (
            "--implementation xla --shapes dense --weights mxfp4",
            "--weights mxfp4: none of the shapes has such",
        ),
        ("--implementation pallas_mosaic", "pallas_mosaic: matmul: pallas_mosaic cannot run: no GPU"),
    ],
)
def test_refusals(arguments, message, refusal, monkeypatch):
    monkeypatch.setattr(command, "time_together", lambda *_: pytest.fail("timed"))
    assert message in refusal("kernel", "--operation", "matmul", *arguments.split())


def test_one_wrong_scale_is_not_timed(tmp_path, monkeypatch, capsys):
    def wrong(x, w, *, spec, wide):
        if not isinstance(w, Mxfp4):  # traced alone, to see whether it runs
            return reference.matmul(x, w, spec=spec, wide=wide)
        scales = w.scales.at[5, 1].add(1)
        return reference.matmul(x, Mxfp4(w.values, scales, w.axis), spec=spec, wide=wide)

    monkeypatch.setitem(api.OPERATION.table, "pallas_triton", Implementation(wrong))
    monkeypatch.setattr(command, "time_together", lambda *_: pytest.fail("timed"))
    words = ["--operation", "matmul", "--shapes", "expert", "--dtypes", "float32", "--seed", "0"]
    assert main(["kernel", *words, "--json", str(tmp_path / "m.json")]) == 1
    shown = capsys.readouterr().err
    assert "pallas_triton is wrong: expert, mxfp4, float32, 3 rows: error of" in shown
    assert "1 of 1 comparisons failed, with --seed 0; nothing was timed" in shown


def test_what_is_wrong():
    exact, sizes = np.ones((1, 2)), np.full((1, 2), 4.0)
    off = exact + 4 * BOUND * np.array([[0.99, 0.0]])
    assert judge(off, off, exact, sizes) == (pytest.approx(0.99 * BOUND), None)
    assert "above" in judge(exact + 4.1 * BOUND, exact, exact, sizes)[1]
    assert "nan" in judge(np.array([[1, np.nan]]), exact, exact, sizes)[1]
    assert judge(off, exact, exact, sizes)[1] == "a second call gives other bits"


def test_bytes_and_candidates():
    qkv, gate_up = SHAPES[0], SHAPES[4]
    assert weight_bytes(qkv, "plain") == 2 * 4096 * 6144
    assert weight_bytes(qkv, "fp8") == 4096 * 6144 + 4 * 32 * 48
    assert weight_bytes(gate_up, "mxfp4") == 2880 * 5760 * 17 // 32
    assert work_of(Case(qkv, "plain", 16)).operations == 2 * 16 * 4096 * 6144
    for shape in SHAPES:
        for stored in shape.stored:
            for rows in shape.rows:
                found = candidates(Case(shape, stored, rows))
                assert len(found) == len(set(found)) > 4
                assert any(isinstance(own, MosaicConfig) for own in found) == (stored == "fp8_rows")


def test_tuning_keeps_the_best_and_goes_on(tmp_path, capsys):
    cases = [Case(DENSE, stored, rows) for stored in ("plain", "fp8") for rows in (1, 3)]
    asked = []

    def score(case, configs):
        asked.append(case)
        if case == cases[1]:
            return [None] * len(configs), 9.0  # nothing runs
        return [None, *(5.0 + i for i in range(len(configs) - 1))], 4.0

    def tune(**settings):
        places = {"table_path": tmp_path / "tuned.json", "json_path": tmp_path / "t.json"}
        return tune_products(cases, limit_seconds=60, opening={}, score=score, **places, **settings)

    assert tune(again=False) == 0
    (entries,) = read_table(tmp_path / "tuned.json").values()
    assert [(entry["stored"], entry["rows"]) for entry in entries] == [("fp8", 1), ("fp8", 3), ("plain", 1)]
    assert all((entry["micros"], entry["xla_micros"]) == (5.0, 4.0) for entry in entries)
    assert CONFIGS[entries[0]["implementation"]](**entries[0]["config"]) == candidates(cases[2])[1]
    assert json.loads((tmp_path / "t.json").read_text())["benchmark"] == "matmul, tuning"
    assert "no configuration runs: dense, plain, 3 rows" in "".join(capsys.readouterr())
    asked.clear()
    tune(again=False)
    assert asked == [cases[1]]
    asked.clear()
    tune(again=True)
    assert asked == cases


@pytest.mark.parametrize("stored", ["fp8", "fp8_rows"])
def test_the_reference_passes_its_own_check(stored):
    [found] = check_products(DENSE, stored, jnp.dtype(jnp.bfloat16), [3], "xla", 0)
    assert found.problem is None
    assert found.rows == 3
    assert BOUND > found.error > 0
