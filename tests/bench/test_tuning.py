"""``python -m bench kernel --tune`` with a made-up clock: what it tries, finds, keeps and leaves."""

import itertools
import json
import time
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pytest

from bench.common.floors import Ceilings
from bench.common.tuned import has_entry, keep, read_table, write_table
from bench.kernel import tuning_run
from bench.kernel.speed import AttentionCase, work_of
from bench.kernel.tuning import STAGES, OutOfTime, Task, makes_sense, search, tasks_of
from pallas_kernels.tree_attention import config as config_module
from pallas_kernels.tree_attention import pallas_triton
from pallas_kernels.tree_attention.config import Config, config_for
from pallas_kernels.tree_attention.shapes import SHAPES, AttentionShape

BY_NAME = {shape.name: shape for shape in SHAPES}
QWEN = Task("bfloat16", 128, 256, ((replace(BY_NAME["qwen3-8b"], page=128), 64),))
BEST = Config(block_rows=64, block_keys=32, num_warps=4, num_stages=3, programs=3 * 132)


def far_from(best):
    """A clock on which a configuration is the slower the more settings are off, and by how much."""

    def score(configs):
        return [
            1 + sum(0.1 * abs(np.log2(asdict(c)[name] / value)) for name, value in asdict(best).items())
            for c in configs
        ]

    return score


def all_alike(tried):
    """A clock on which all take a second; ``tried`` gets what is timed in each pass."""
    return lambda configs: tried.append(configs) or [1.0] * len(configs)


class TestTasks:
    def test_shapes_share_entries(self):
        tasks = tasks_of((BY_NAME["qwen3-8b"], BY_NAME["qwen3-0.6b"]), ("bfloat16", "float32"), (1, 32, 64))
        assert [task[:3] for task in tasks] == [
            (dtype, 128, rows) for dtype in ("bfloat16", "float32") for rows in (2, 4, 64, 128, 256)
        ]
        assert [(shape.name, rows) for shape, rows in tasks[3].calls] == [
            ("qwen3-8b", 32),
            ("qwen3-0.6b", 64),
        ]

    @pytest.mark.parametrize("task", tasks_of(SHAPES, ("bfloat16", "float32"), None), ids=str)
    def test_every_registered_call_has_something_to_try(self, task):
        passes = []
        search(task, all_alike(passes), 132)
        tried = list(itertools.chain(*passes))
        assert len(set(tried)) == len(tried) > 0
        assert all(makes_sense(config, task) for config in tried)
        assert len(tried) < 120


class TestPruning:
    @pytest.mark.parametrize(
        ("change", "sensible"),
        [
            ({}, True),
            ({"block_rows": 128, "num_warps": 8}, True),
            ({"block_rows": 128}, True),
            ({"block_rows": 128, "num_warps": 2}, False),  # 256 accumulators a thread
            ({"block_rows": 16, "num_warps": 8}, False),  # warps without a product
            ({"block_keys": 256, "num_stages": 1}, False),  # two pages; 144 KiB
            ({"block_keys": 128, "num_stages": 6}, True),  # no step more is ahead
            ({"block_keys": 128, "num_stages": 7}, False),  # 272 KiB
            ({"block_rows": 128, "block_keys": 128, "num_stages": 5}, True),  # 224 KiB
        ],
    )
    def test_of_256_rows(self, change, sensible):
        assert makes_sense(replace(BEST, **change), QWEN) == sensible


class TestSearch:
    def test_finds_the_best(self):
        for stages in STAGES:
            best = replace(BEST, num_stages=stages)
            ranking = search(QWEN, far_from(best), 132)
            assert ranking[0] == (1.0, best)
            assert [score for score, _ in ranking] == sorted(score for score, _ in ranking)

    def test_what_fails_is_left_out(self):
        def score(configs):
            found = far_from(BEST)(configs)
            return [float("inf") if c.block_rows == 64 else s for c, s in zip(configs, found, strict=True)]

        ranking = search(QWEN, score, 132)
        assert ranking[0][1].block_rows in (32, 128)
        assert np.isfinite([found for found, _ in ranking]).all()
        assert search(QWEN, lambda configs: [float("inf")] * len(configs), 132) == []

    def test_the_first_pass_is_one_step_ahead(self):
        passes = []
        search(QWEN, all_alike(passes), 132)
        assert {(config.num_stages, config.programs) for config in passes[0]} == {(3, 132)}

    def test_launches_that_are_equal_are_tried_once(self):
        """2,048 rows in tiles of 128 for eight heads are 128 programs, also where up to 255 are asked for."""
        passes = []
        search(QWEN._replace(rows=2048), all_alike(passes), 132)
        assert {config.programs for config in itertools.chain(*passes)} == {132, 264, 396, 528}

    def test_the_deadline(self):
        with pytest.raises(OutOfTime):
            search(QWEN, far_from(BEST), 132, time.monotonic() - 1)


class TestTable:
    def test_an_entry_is_added_in_order_or_replaced(self, tmp_path, monkeypatch):
        path = tmp_path / "tuned.json"
        assert read_table(path) == {}
        best = {"config": asdict(BEST)}
        keep(path, "other device", QWEN.key, best)
        other = read_table(path)
        for rows in (1024, 4, 256):
            keep(path, "device", QWEN._replace(rows=rows).key, best)
        keep(path, "device", QWEN._replace(dtype="float32").key, best)
        keep(path, "device", QWEN.key, {"config": asdict(replace(BEST, num_warps=8))})
        table = read_table(path)
        assert [(entry["dtype"], entry["rows"]) for entry in table["device"]] == [
            ("bfloat16", 4),
            ("bfloat16", 256),
            ("bfloat16", 1024),
            ("float32", 256),
        ]
        assert table["other device"] == other["other device"]
        assert has_entry(path, "device", QWEN.key)
        assert not has_entry(path, "device", QWEN._replace(head_size=64).key)
        assert not has_entry(path, "third device", QWEN.key)
        assert len(path.read_text().splitlines()) == 2 + 2 * 2 + 5
        # As the kernel reads it: the first entry that holds the call's rows.
        monkeypatch.setattr(config_module, "tuned", lambda: table)
        assert config_for("device", "bfloat16", 128, 5) == replace(BEST, num_warps=8)
        assert config_for("device", "float16", 128, 257) == BEST

    def test_an_empty_table_is_written(self, tmp_path):
        write_table(tmp_path / "tuned.json", {})
        assert read_table(tmp_path / "tuned.json") == {}


class TestTune:
    def tune(self, tmp_path, *, make_score=None, rows=(16, 64), limit_seconds=60.0, again=False):
        return tuning_run.tune(
            (BY_NAME["qwen3-8b"],),
            ("bfloat16",),
            rows,
            (1024, 8192),
            limit_seconds=limit_seconds,
            again=again,
            table_path=tmp_path / "tuned.json",
            json_path=tmp_path / "tuning.json",
            opening={"command": "python -m bench kernel --tune"},
            make_score=make_score or (lambda task, prefixes: far_from(BEST)),
        )

    def test_goes_on_where_it_stopped(self, tmp_path, capsys):
        assert self.tune(tmp_path, limit_seconds=-1.0) == 0
        out = capsys.readouterr().out
        assert "remains: bfloat16, head size 128, 64 rows" in out
        assert "remains: bfloat16, head size 128, 256 rows" in out
        assert not list(tmp_path.iterdir())

        assert self.tune(tmp_path, rows=(64,)) == 0
        (entries,) = read_table(tmp_path / "tuned.json").values()
        found = Config(**entries[0]["config"])
        assert replace(found, programs=1) == replace(BEST, programs=1)
        report = json.loads((tmp_path / "tuning.json").read_text())
        (task,) = report["tasks"]
        assert report["command"] == "python -m bench kernel --tune"
        assert task["ranking"][0] == {"x floor": task["x floor"], "config": asdict(found)}
        assert task["calls"] == [{"shape": "qwen3-8b", "rows": 64}]

        asked = []

        def make_score(task, prefixes):
            asked.append((task.rows, tuple(prefixes)))
            return far_from(BEST)

        assert self.tune(tmp_path, make_score=make_score) == 0
        assert asked == [(64, (1024, 8192))]
        assert "1 of 2 entries are there already" in capsys.readouterr().out
        (entries,) = read_table(tmp_path / "tuned.json").values()
        assert [entry["rows"] for entry in entries] == [64, 256]
        assert self.tune(tmp_path, make_score=make_score, again=True) == 0
        assert len(asked) == 3

    def test_nothing_that_runs_is_no_entry(self, tmp_path):
        failing = lambda task, prefixes: lambda configs: [float("inf")] * len(configs)  # noqa: E731
        assert self.tune(tmp_path, make_score=failing) == 0
        assert not list(tmp_path.iterdir())


@pytest.mark.wide
def test_only_what_is_right_is_timed(monkeypatch):
    """The kernel on Pallas's interpreter, with one configuration that computes something else."""
    shape = AttentionShape("tiny", heads=2, kv_heads=1, head_size=16, window=20, sinks=True, page=16)
    task = Task("float32", 16, 10, ((shape, 5),))
    wrong, right = Config(16, 16, 2, 1, 3), Config(16, 16, 2, 1, 4)
    attend, timed = partial(pallas_triton.tree_attention, interpret=True), []

    def run(*args, config, **settings):
        return attend(*args, config=config, **settings) * (1.01 if config == wrong else 1)

    def kernel_micros(programs, name):
        timed.extend(programs)
        return [{"tree_attention": 2e6, "tree_attention_merge": 1e6}] * len(programs)

    monkeypatch.setattr(pallas_triton, "tree_attention", run)
    monkeypatch.setattr(tuning_run, "kernel_micros", kernel_micros)
    monkeypatch.setattr(tuning_run, "LAYERS", 4)
    ceilings = Ceilings(reduction=1e3, copy=1e3, matmul=1e3)
    scores = tuning_run.score_of(task, (32, 64), ceilings)([wrong, right])
    floors = [ceilings.seconds(work_of(AttentionCase(shape, 5, prefix, 1, "float32"))) for prefix in (32, 64)]
    assert scores == [float("inf"), pytest.approx(sum(3 / floor for floor in floors))]
    assert [int(program.arguments[0].prefix.lengths[0]) for program in timed] == [32, 64]
