"""``python -m bench round`` on a tiny shape: what it measures and what it reports."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import bench.round.command
from bench.__main__ import main
from bench.common.collectives import Collective
from bench.common.floors import Ceilings
from bench.common.kernel_trace import Kernel
from bench.common.scene import random_weights
from bench.common.shapes import SHAPES
from bench.round import phases
from bench.round.command import groups
from bench.round.measure import CaseRuns, RoundCase, Setup
from bench.round.report import row_of, tables_of
from jetspec_jax import DecodeWeights, SamplingParams
from jetspec_jax.decode.state import join
from jetspec_jax.demo import DEMO_DRAFT_HEAD, DEMO_TARGET
from pallas_kernels.tree_attention import implementations
from tests.meshes import mesh_of

TINY = SHAPES["tiny"]
FLOAT32 = jnp.dtype(jnp.float32)
SETUP = Setup(
    SamplingParams(temperature=1.0),
    width=7,
    rounds=2,
    repeats=1,
    implementation="xla",
    phases=True,
    profile=False,
)


@pytest.fixture
def made_up_times(monkeypatch):
    """Case i takes i tenths of a second: what rounds really take is another test's matter."""

    def measure(cases, *_):
        return {
            case: CaseRuns([0.1 * i], [0.2 * i], tokens_per_round=1.0, compile_seconds={"decode": 1.0})
            for i, case in enumerate(cases, start=1)
        }

    monkeypatch.setattr(bench.round.command, "measure", measure)
    monkeypatch.setattr(bench.round.command, "measure_ceilings", lambda *_: Ceilings(1e9, 1e9, 1e9))


class TestReport:
    @pytest.mark.wide
    def test_every_case_has_its_phases_and_floors(self, report_of, capsys):
        report = report_of(
            "round",
            "--shape tiny --budgets 12 --contexts 70 --batches 2 --rounds 3 --repeats 2 --profile "
            "--algorithms top_nodes --temperature 1 --top-p 0.9",
        )
        assert report["shape"] == "tiny"
        assert report["shapes"]["hidden_size"] == TINY.target.hidden_size
        assert report["compilation_cache"] is True  # of the tests themselves
        assert report["rounds_per_dispatch"] == 3
        assert report["implementation"] in implementations()
        assert all(value > 0 for value in report["ceilings"].values())

        plain, tree = report["rows"]
        assert [row["budget"] for row in (plain, tree)] == [1, 12]
        assert [row["bucket"] for row in (plain, tree)] == [1, 16]
        for row in (plain, tree):
            assert (row["batch"], row["context"]) == (2, 70)
            # 70 tokens and room for 3 rounds of up to 8, in pages of 64.
            assert row["capacity"] == 128
            assert list(row["phases_ms"]) == ["propose", "verify", "settle"]
            assert row["phases_sum_ms"] == pytest.approx(sum(row["phases_ms"].values()))
            assert row["floor_ms"] == pytest.approx(sum(part["ms"] for part in row["floors"].values()))
            assert all(part["ms"] > 0 for part in row["floors"].values())
            assert row["times_floor"] == pytest.approx(row["round_ms"] / row["floor_ms"])
            assert row["times_plain"] == pytest.approx(row["round_ms"] / plain["round_ms"])
            assert row["times_chain"] is None
            assert row["round_ms"] == pytest.approx(1e3 * np.median(row["dispatch_seconds"]) / 3)
            assert row["single_ms"] == pytest.approx(1e3 * np.median(row["single_seconds"]) / 3)
            assert row["single_over_loop"] == pytest.approx(row["single_ms"] / row["round_ms"])
            assert len(row["dispatch_seconds"]) == len(row["single_seconds"]) == 2
            assert 1 <= row["tokens_per_round"] <= 8
            assert all(seconds > 0 for seconds in row["compile_seconds"].values())
        assert [row["algorithm"] for row in (plain, tree)] == ["plain", "top_nodes"]
        assert plain["tokens_per_round"] == 1
        assert plain["phases_ms"]["propose"] == 0
        assert all(seconds > 0 for seconds in tree["phases_ms"].values())
        assert set(plain["floors"]) == {"verify", "settle"}
        assert set(tree["floors"]) == {"propose", "verify", "settle"}
        assert set(plain["compile_seconds"]) == {"decode", "verify", "settle"}
        assert set(tree["compile_seconds"]) == {"decode", *phases.PHASES}

        out = capsys.readouterr().out
        assert f"attention {report['implementation']}" in out
        if report["platform"] == "cpu":
            assert plain["profile"] == tree["profile"] == {}
            assert "has no GPU streams" in out

    @pytest.mark.usefixtures("made_up_times")
    def test_checkpoints_are_named_without_their_folders_and_with_their_shapes(self, tmp_path, monkeypatch):
        monkeypatch.chdir(DEMO_TARGET.parent)
        path, plot = tmp_path / "round.json", tmp_path / "plots" / "round.svg"
        models = ["--target", str(DEMO_TARGET), "--draft-head", str(DEMO_DRAFT_HEAD)]
        arguments = "--budgets 1 --contexts 40 --rounds 2 --repeats 1 --no-phases"
        assert main(["round", *models, *arguments.split(), "--json", str(path), "--plot", str(plot)]) == 0
        report = json.loads(path.read_text())
        assert (report["target"], report["draft_head"]) == (DEMO_TARGET.name, DEMO_DRAFT_HEAD.name)
        assert report["arguments"]["target"] == DEMO_TARGET.name
        head = {"head_layers": 4, "block_size": 16, "causal_head": True}
        assert report["shapes"] == {"layers": 8, "hidden_size": 256, "vocab_size": 4096, **head}
        assert str(DEMO_TARGET.parent) not in path.read_text()
        (row,) = report["rows"]
        assert (row["budget"], row["phases_ms"], row["profile"]) == (1, {}, None)
        assert plot.exists()

    @pytest.mark.usefixtures("made_up_times")
    def test_algorithms_share_a_plain_step(self, report_of, capsys):
        report = report_of(
            "round",
            "--shape tiny --budgets 16 1 --contexts 40 --rounds 1 --repeats 1 --no-phases "
            "--algorithms chain top_nodes chain",
        )
        plain, *trees = report["rows"]
        assert [(row["budget"], row["algorithm"]) for row in report["rows"]] == [
            (1, "plain"),
            (8, "chain"),
            (16, "top_nodes"),
        ]
        for row in trees:
            assert row["times_plain"] == pytest.approx(row["round_ms"] / plain["round_ms"])
        assert [row["times_plain"] for row in trees] == pytest.approx([2.0, 3.0])
        assert [row["times_chain"] for row in report["rows"]] == pytest.approx([0.5, 1.0, 1.5])
        assert "x chain" in capsys.readouterr().out
        assert report["arguments"]["algorithms"] == ["chain", "top_nodes", "chain"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--shape qwen9", "--shape must be one of tiny"),
            ("--shape tiny --target x --draft-head y", "--shape means random weights"),
            ("--target x", "--draft-head is missing: trees for x need a head"),
            ("--target x --draft-head y --selector-rank 4", "--selector-rank is for random weights"),
            ("--shape tiny --algorithms auto", "--algorithms auto: auto chooses budgets"),
            ("--shape tiny --width 600", "width must lie in 1..512"),
            ("--shape tiny --contexts 4090", "context limit of 4096"),
            (
                "--shape tiny --tensor-parallel-size 1 --phases",
                "--phases goes with neither --tensor-parallel-size nor",
            ),
            ("--shape tiny --tensor-parallel-size 1000", "needs 1000 devices"),
            ("--shape tiny --temperature -1", "temperature"),
            ("--shape tiny --implementation cuda", "tree_attention has no implementation 'cuda'"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments, message, refusal):
        assert message in refusal("round", *arguments.split())


class TestMeasuring:
    @pytest.mark.wide
    def test_phases_in_a_row_are_a_round(self):
        case = RoundCase(batch=2, context=70, budget=16, algorithm="hybrid")
        decoder, scene = SETUP.decoder(case, TINY), SETUP.scene(case, TINY)
        weights = DecodeWeights(
            random_weights(TINY.target, FLOAT32, seed=0), random_weights(TINY.head, FLOAT32, seed=1)
        )
        stores = scene.stores(decoder, FLOAT32)
        state = scene.slots(decoder, FLOAT32, case.budget, SETUP.params)
        expected, expected_record = jax.jit(decoder.round)(weights, join(stores, state))

        made = {}
        for turns, phase in enumerate(phases.PHASES, start=1):
            stores, made[phase] = phases.repeat(decoder)(
                decoder, phase, weights, stores, (state, dict(made)), np.int32(turns)
            )
        after, record = made["settle"]
        np.testing.assert_array_equal(made["propose"].num_nodes, [16, 16])
        # Phases of their own do not look for drafts that are not numbers.
        jax.tree.map(np.testing.assert_array_equal, record, expected_record._replace(nan_drafts=None))
        jax.tree.map(
            lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5),
            join(stores, after),
            expected,
        )

    def test_slots_hold_random_tokens_in_scattered_pages(self):
        case = RoundCase(batch=3, context=70, budget=16)
        decoder, scene = SETUP.decoder(case, TINY), SETUP.scene(case, TINY)
        state = scene.slots(decoder, FLOAT32, case.budget, SETUP.params)
        tables = np.asarray(state.slots.block_tables)
        assert sorted(tables.ravel()) == list(range(3 * scene.pages_per_slot))
        assert sorted(tables.ravel()) != tables.ravel().tolist()
        np.testing.assert_array_equal(state.slots.lengths, [70, 70, 70])
        assert np.all(state.active)
        stores = scene.stores(decoder, FLOAT32)
        for leaf in jax.tree.leaves(stores):
            assert np.all(leaf != 0)
        assert scene.num_bytes(decoder, FLOAT32) == sum(leaf.nbytes for leaf in jax.tree.leaves(stores))

    def test_cases_take_turns_if_their_stores_fit(self):
        cases = [RoundCase(1, context, budget) for context in (70, 700) for budget in (1, 16)]
        assert groups(cases, TINY, FLOAT32, SETUP, None) == [cases]
        assert groups(cases, TINY, FLOAT32, SETUP, 1 << 40) == [cases]
        assert groups(cases, TINY, FLOAT32, SETUP, 1 << 10) == [cases[:2], cases[2:]]


def test_a_profile_adds_the_time_of_collectives_and_the_idle_time():
    """Rounds of 30 us, of which kernels run 20; under the profiler they last 75."""
    kernels = [
        Kernel("psum_1_fusion", 0, 9e3),
        Kernel("all_gather", 60e3, 1e3),
        Kernel("gemm", 70e3, 10e3),
        Kernel("psum_1_fusion", 80e3, 8e3),
        Kernel("gemm", 138e3, 12e3),
    ]
    found = CaseRuns([60e-6], [70e-6], tokens_per_round=1.0, compile_seconds={"decode": 1.0}, kernels=kernels)
    found.collectives = [
        Collective("sum", 1024, False, 1),
        Collective("gather", 512, False, 1),
        # Those that a round need not come to once.
        Collective("gather", 512, True, 1),
        Collective("sum", 512, False, 2),
    ]
    case, setup = RoundCase(1, 70, 1), dataclasses.replace(SETUP, mesh=mesh_of(2, 4))
    row = row_of(case, found, {case: found}, TINY, 4, setup, Ceilings(1e9, 1e9, 1e9))
    # Of eight devices each sends seven eighths of a sum twice, and of a gather once.
    assert row["exchanges"]["sums"] == {"count": 1, "bytes": 1792}
    assert row["exchanges"]["gathers"] == {"count": 1, "bytes": 448}
    assert row["exchanges"]["varying"] == 2
    assert row["idle_ms"] == pytest.approx(0.010)
    assert row["profile"]["idle_us"] == pytest.approx(55)
    [table] = [rows for title, rows in tables_of([row]) if title == "What each device exchanges in a round"]
    shown = {name: table[0][name] for name in ("sums", "gathers", "us", "launches", "idle us")}
    assert shown == pytest.approx({"sums": 1, "gathers": 1, "us": 9, "launches": 1.5, "idle us": 10})
