"""Estimates of a pair's cost, recipes that fit a time, and consent to hours of a CPU."""

import dataclasses
import io
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.config import parse_draft_head_config
from jetspec_jax.device.memory import DeviceMemoryError
from tests.train.pair.test_recipe import default, target
from train.data.records import Document
from train.data.regenerate import Prompts
from train.head.config import head_json
from train.pair import cost, stages
from train.pair.cost import (
    Rates,
    answered,
    check_disk,
    cost_of,
    fitted,
    rough_hours,
    trial_rates,
    trial_texts,
)
from train.pair.recipe import scaled
from train.pair.stages import ask_for_hours

RATES = Rates(tokens=20_000.0, alone=1_000.0, step=0.05, begun=60.0)


@pytest.fixture(scope="module")
def one():
    return target(576, layers=30, vocab=2048)


@pytest.fixture(scope="module")
def recipe(one):
    return default(one)


@pytest.fixture(scope="module")
def head(one, recipe):
    return parse_draft_head_config(head_json(one, recipe.head.head))


def test_estimates_follow_the_sizes(head, recipe):
    found = cost_of(recipe, RATES, head, [])
    assert list(found.minutes) == ["prompts", "answers", "head", "selector", "calibrate", "judge"]
    evaluating = 6 * 32 * 128 / 2 * (16 + 64) / RATES.tokens
    assert found.minutes["head"] == pytest.approx((12_000 * 0.05 + 60 + evaluating) / 60)
    assert found.minutes["prompts"] == pytest.approx(32_000 * 192 * 0.5 / 20_000 / 60)
    assert found.lines()[-1].startswith("  in all about ")
    assert cost_of(recipe, RATES, head, [10**6]).minutes["answers"] == pytest.approx(
        (40_000 * 256 * 0.75 / 20_000 + 20) / 60
    )
    half = cost_of(scaled(recipe, 0.5), RATES, head, [])
    for name in ("prompts", "answers", "head"):
        assert half.minutes[name] < found.minutes[name]
    assert half.disk < found.disk
    wide = dataclasses.replace(head, layers=dataclasses.replace(head.layers, hidden_size=2 * 576))
    assert cost_of(recipe, RATES, wide, []).disk > found.disk


def test_answers_are_those_of_the_prompts_that_are_kept_and_mixed(head, recipe):
    assert answered(recipe, [1_000, 3]) == 33_003
    assert answered(recipe, [1_000, 3], kept=0.25) == 9_003
    mixed = dataclasses.replace(recipe, weights=(1.0, 3.0), share=0.5)
    assert answered(mixed, [1_000], kept=0.25) == 166 + 500
    assert answered(dataclasses.replace(mixed, writing=(), weights=None), [1_000, 3]) == 500 + 2
    whole, quarter = (
        cost_of(recipe, RATES._replace(kept=kept), head, []).minutes["answers"] for kept in (1.0, 0.25)
    )
    assert whole - quarter == pytest.approx(24_000 * 256 * 0.75 / 20_000 / 60)
    with pytest.raises(ValueError, match="1 weights for 2 sources"):
        answered(dataclasses.replace(recipe, weights=(1.0,)), [1_000])


@pytest.mark.parametrize("minutes", [12.0, 20.0, 60.0])
def test_a_recipe_fits_its_time(head, recipe, minutes):
    found = fitted(recipe, RATES, head, [], minutes, 1.5)
    assert sum(cost_of(found, RATES, head, []).minutes.values()) == pytest.approx(minutes - 1.5, rel=0.02)
    found.check()


def test_a_time_that_is_too_short_names_the_least(head, recipe):
    least = sum(cost_of(scaled(recipe, 0.0), RATES, head, []).minutes.values())
    with pytest.raises(
        ValueError, match=r"1 minutes are too few: this check took 0\.5, and the smallest recipe takes about"
    ) as short:
        fitted(recipe, RATES, head, [], 1.0, 0.5)
    assert f"about {-(-least // 1):.0f} more on this device" in str(short.value)
    assert str(short.value).endswith(f"give --total-minutes {-(-(least + 0.5) // 1):.0f}")


def test_evaluations_are_a_part_of_the_head_s_time(head, recipe):
    evaluation = dataclasses.replace(recipe.head.evaluation, prompts=2 * recipe.head.evaluation.prompts)
    more = dataclasses.replace(recipe, head=dataclasses.replace(recipe.head, evaluation=evaluation))
    apart = [cost_of(each, RATES, head, []).minutes["head"] for each in (recipe, more)]
    fit, rounds = recipe.head.fit, evaluation.prompts / 2 * evaluation.new_tokens / 2
    seconds = fit.steps / fit.evaluate_every * rounds * sum(evaluation.budgets) / RATES.tokens
    assert 60 * (apart[1] - apart[0]) == pytest.approx(seconds)


def test_a_disk_without_room_is_named_before_anything_is_made(tmp_path, monkeypatch):
    check_disk(tmp_path, 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**30))
    with pytest.raises(OSError, match=r"has 1\.0 GiB free, and about 3\.0 GiB are needed"):
        check_disk(tmp_path, 3 * 2**30)


def test_too_many_slots_and_too_large_steps_name_their_settings(tmp_path, monkeypatch, one, recipe):
    def fail(error):
        def run(*_, **__):
            raise error

        return run

    target = SimpleNamespace(config=one.config, dtype=np.dtype("float32"))
    prompts = Prompts([[1, 2]], [SamplingParams(max_tokens=2)])
    monkeypatch.setattr(cost, "regenerate", fail(DeviceMemoryError("max_slots=8 fits")))
    with pytest.raises(DeviceMemoryError, match="max_slots=8 fits; here max_slots is the setting slots"):
        trial_texts(tmp_path / "texts", target, prompts, recipe)
    texts = [Document(np.arange(5, dtype=np.int32), np.ones(5, bool))]
    monkeypatch.setattr(cost, "generate", lambda *_, **__: None)
    given = tmp_path / "trial", target, texts, 1.0, recipe, None
    for error, message in (
        (
            RuntimeError("RESOURCE_EXHAUSTED: 9 GiB"),
            r"step of 32 windows of 512 .*set head\.fit\.micro_batch",
        ),
        (RuntimeError("a tracker"), "^a tracker$"),
    ):
        monkeypatch.setattr(cost, "train_head", fail(error))
        with pytest.raises((ValueError, RuntimeError), match=message):
            trial_rates(*given)


def test_hours_of_a_cpu_need_consent(monkeypatch, one, recipe):
    hours = rough_hours(one.config, recipe, [])
    assert hours > rough_hours(one.config, scaled(recipe, 0.1), []) > 0
    assert rough_hours(one.config, recipe, [1_000]) > hours
    ask_for_hours(2.0)
    with pytest.raises(
        ValueError, match="this CPU would take about 1,234 hours; use a GPU, give --total-min"
    ):
        ask_for_hours(1234.0)

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    for answer, goes_on in (("y\n", True), ("\n", False)):
        monkeypatch.setattr(stages.sys, "stdin", Terminal(answer))
        if goes_on:
            ask_for_hours(1234.0)
        else:
            with pytest.raises(ValueError, match="use a GPU"):
                ask_for_hours(1234.0)
