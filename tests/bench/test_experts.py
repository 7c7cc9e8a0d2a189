"""``python -m bench kernel --operation experts`` on tiny shapes: wrong kernels are caught, reports add up."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.__main__ import main
from bench.common.floors import Ceilings
from bench.experts import cases as expert_cases
from bench.experts import command as experts
from bench.experts import speed as expert_speed
from bench.experts.cases import expert_work, experts_by, random_choices, random_layer, touched
from bench.experts.check import check_experts
from pallas_kernels.activation import Activation
from pallas_kernels.dispatch import Implementation
from pallas_kernels.expert_choice import RouterRule
from pallas_kernels.expert_choice import api as choice_api
from pallas_kernels.expert_choice import reference as choice_reference
from pallas_kernels.expert_mlp import api, reference
from pallas_kernels.expert_mlp.shapes import ExpertShape

PLAIN = ExpertShape("plain", 8, 32, 24, RouterRule(2), tokens=(1, 4))
OSS = ExpertShape("oss", 4, 32, 16, RouterRule(2), Activation.gpt_oss(), biases=True, tokens=(3,))


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(experts, "SHAPES", (PLAIN, OSS))
    monkeypatch.setattr(experts, "DEFAULT_SHAPES", ("plain",))
    monkeypatch.setattr(experts, "measure_ceilings", lambda *_: Ceilings(1e9, 2e9, 1e10))


def run(path, arguments):
    return main(["kernel", "--operation", "experts", *arguments.split(), "--json", str(path)])


class TestCommand:
    @pytest.mark.wide
    def test_report(self, report_of, capsys):
        words = "--implementation xla --baselines ragged_dot --dtypes float32 --rows 1 --repeats 1 --seed 3"
        report = report_of("kernel", f"--operation experts {words}")
        assert [row["tokens"] for row in report["rows"]] == [1, 1]
        assert len(report["checks"]) == 2
        assert report["command"].startswith("python -m bench kernel --operation experts --shapes plain ")
        for row in report["rows"]:
            assert row["us"] == row["wall_us"] > 0  # there is no GPU
            assert set(row["others"]) == ({"ragged_dot"} if row["operation"] == "expert_mlp" else set())
        first = report["rows"][0]
        assert first["experts"] == 2
        assert first["bytes"] == 4 * (2 * 3 * 32 * 24 + 2 * 32)
        assert first["operations"] == 6 * 2 * 32 * 24
        assert first["floor_us"] == pytest.approx(max(first["bytes"] / 2e9, first["operations"] / 1e10) * 1e6)
        assert first["times_floor"] == pytest.approx(first["us"] / first["floor_us"])
        assert report["seed"] == 3
        shown = capsys.readouterr().out
        assert "expert_mlp, plain" in shown
        assert "expert_choice, plain" in shown

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ("--shapes qwen3-8b", "--shapes must be one of plain, oss, not 'qwen3-8b'"),
            ("--implementation pallas_triton", "pallas_triton: expert_mlp: pallas_triton cannot run: no GPU"),
            (
                "--implementation xla --weights fp8 --baselines ragged_dot",
                "--weights fp8 does not go with ragged_dot, tokamax",
            ),
            (
                "--implementation xla --weights fp8_rows",
                "--weights must be one of plain, fp8, mxfp4, not 'fp8_rows'",
            ),
            ("--tune", "--operation experts has no --prefixes, --batch, --tune and --again"),
        ],
    )
    def test_refusals(self, arguments, message, refusal, monkeypatch):
        monkeypatch.setattr(experts, "time_shape", lambda *_: pytest.fail("timed"))
        assert message in refusal("kernel", "--operation", "experts", *arguments.split())

    @pytest.mark.parametrize("operation", ["expert_mlp", "expert_choice"])
    def test_a_wrong_kernel_is_not_timed(self, operation, tmp_path, monkeypatch, capsys):
        def wrong_mlp(*arrays, activation):
            return reference.expert_mlp(*arrays, activation=activation).at[0, 0].add(0.1)

        def wrong_choice(*arrays, routing):
            experts, weights = choice_reference.expert_choice(*arrays, routing=routing)
            return choice_reference.ExpertChoice(experts[:, ::-1], weights)

        own, other = (wrong_mlp, choice_reference.expert_choice)
        if operation == "expert_choice":
            own, other = reference.expert_mlp, wrong_choice
        for module, function in ((api, own), (choice_api, other)):
            monkeypatch.setitem(module.OPERATION.table, "pallas_triton", Implementation(function))
        monkeypatch.setattr(experts, "time_shape", lambda *_: pytest.fail("timed"))
        assert run(tmp_path / "e.json", "--dtypes float32 --rows 4 --baselines --seed 0") == 1
        shown = capsys.readouterr().err
        assert f"pallas_triton is wrong: {operation} of plain, float32, 4 tokens: relative error" in shown
        assert "1 of 2 comparisons failed, with --seed 0; plain was not timed" in shown


class TestCases:
    @pytest.mark.parametrize("stored", ["fp8", "mxfp4"])
    def test_quantised_layers(self, stored):
        shape = replace(PLAIN, features=32)
        dtype = jnp.dtype("float32")
        [check] = check_experts(shape, random_layer(shape, dtype, stored), dtype, [4], "xla", 0)
        assert check.problem is None
        plain, own = (expert_work(shape, 4, 2, 2, word) for word in ("plain", stored))
        bits = {"fp8": 8, "mxfp4": 4.25}[stored]
        assert plain.bytes - own.bytes == 2 * 3 * 32 * 32 * (16 - bits) / 8

    def test_choices_never_name_the_last_expert_nor_one_twice(self):
        choice = random_choices(np.random.default_rng(0), PLAIN, 20, 4)
        assert choice.experts.shape == (20, 4, 2)
        assert int(choice.experts.max()) == 6
        assert (choice.experts[:, :, 0] != choice.experts[:, :, 1]).all()
        np.testing.assert_allclose(choice.weights.sum(axis=-1), 1, rtol=1e-6)
        assert 2 < touched(choice) < 7

    def test_ragged_dot_is_the_same_operation(self):
        layer = jax.tree.map(lambda leaf: leaf.at[-1].set(0.0), random_layer(OSS, jnp.dtype("float32")))
        choice = jax.tree.map(lambda leaf: leaf[0], random_choices(np.random.default_rng(0), OSS, 1, 5))
        x = jnp.asarray(np.random.default_rng(1).standard_normal((5, 32), np.float32))
        ragged, own = (jax.jit(experts_by(OSS, name))(layer, x, choice) for name in ("ragged_dot", "xla"))
        np.testing.assert_allclose(ragged, own, rtol=1e-4, atol=1e-6)

    def test_the_last_expert_is_nan(self):
        layer = random_layer(OSS, jnp.dtype("bfloat16"))
        for leaf in layer:
            assert np.isnan(leaf[-1]).all()
            assert np.isfinite(leaf[:-1]).all()

    def test_calls_of_a_chain_wait_for_each_other(self):
        choices = random_choices(np.random.default_rng(0), PLAIN, 4, 3)
        layer = random_layer(PLAIN, jnp.dtype("float32"))
        seen = expert_cases.chain_experts(
            lambda _, x, own: x + own.weights[0, 0], layer, jnp.zeros((3, 2)), choices
        )
        np.testing.assert_allclose(seen, np.full((3, 2), choices.weights[:, 0, 0].sum()), rtol=1e-6)

    def test_work(self):
        work = expert_work(OSS, 3, 2.5, 2)
        assert work.bytes == 2 * (2.5 * (3 * 32 * 16 + 2 * 16 + 32) + 2 * 3 * 32)
        assert work.operations == 3 * 2 * 6 * 32 * 16


def test_a_routers_kernel_counts_alone():
    assert expert_speed.counted_of("expert_choice", "pallas_triton") == "expert_choice"
    assert expert_speed.counted_of("expert_choice", "xla") is None
    assert expert_speed.counted_of("expert_mlp", "pallas_triton") is None
