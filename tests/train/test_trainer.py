"""The loop: it learns, goes on exactly where it stopped, and refuses what it cannot go on with."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.recipes import TINY, Fit
from train.stages import Deadline, OutOfTime, claim
from train.trainer import train

FIT = Fit(
    steps=24, batch=4, window=8, learning_rate=3e-2, warmup=4, save_every=5, evaluate_every=6, log_every=4
)


class StopAfter(Deadline):
    """A limit on the number of looks at the clock."""

    def __init__(self, looks):
        super().__init__()
        self.looks = looks

    def passed(self):
        self.looks -= 1
        return self.looks < 0


def loss(weights, data, key):
    """A noisy regression: what a step sees depends on its key."""
    x = jax.random.normal(key, (4, 3))
    error = x @ weights["a"] - x @ data
    value = jnp.mean(error**2) + jnp.mean(weights["layers"][0] ** 2)
    return value, {"first": error[0]}


def run(folder, deadline=None, loss=loss, validate=None, fit=FIT):
    weights = {"a": jnp.ones((3, 2)), "layers": {0: jnp.ones(2)}}
    return train(
        folder,
        fit,
        loss,
        weights,
        jnp.arange(6.0).reshape(3, 2),
        validate=validate or (lambda w: {"loss": jnp.mean(w["a"] ** 2)}),
        seed=0,
        deadline=deadline or Deadline(),
        label="test",
    )


def records(folder):
    """The log without what depends on the clock."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    return folder, run(folder)


def test_the_loss_falls(whole):
    losses = [r["loss"] for r in records(whole[0]) if "loss" in r]
    assert len(losses) == FIT.steps
    assert np.mean(losses[-4:]) < 0.7 * np.mean(losses[:4])


@pytest.mark.parametrize("looks", [[0], [7, 9], [22]])
def test_a_stopped_run_goes_on_bit_for_bit(whole, tmp_path, looks):
    for count in looks:
        with pytest.raises(OutOfTime, match=r"test: step \d+ of 24"):
            run(tmp_path, StopAfter(count))
    weights = run(tmp_path)
    assert records(tmp_path) == records(whole[0])
    jax.tree.map(np.testing.assert_array_equal, weights, whole[1])


def test_a_killed_run_goes_on_from_its_last_checkpoint(whole, tmp_path):
    class Killed(BaseException):
        pass

    calls = []

    def validate(weights):
        calls.append(1)
        if len(calls) == 3:  # at step 18: the last checkpoint is that of step 15
            raise Killed
        return {"loss": jnp.mean(weights["a"] ** 2)}

    with pytest.raises(Killed):
        run(tmp_path, validate=validate)
    assert records(tmp_path)[-1]["step"] == 18
    run(tmp_path)
    assert records(tmp_path) == records(whole[0])


def test_the_best_weights_are_kept(tmp_path):
    values = iter([3.0, 1.0, 2.0, 1.0])
    seen = []

    def validate(weights):
        seen.append(jax.tree.map(np.asarray, weights))
        return {"loss": jnp.float32(next(values))}

    best = run(tmp_path, validate=validate)
    jax.tree.map(np.testing.assert_array_equal, best, seen[1])


def test_a_finished_run_is_only_read(whole):
    again = run(whole[0], StopAfter(0))
    jax.tree.map(np.testing.assert_array_equal, again, whole[1])


def test_a_loss_that_is_no_number_stops_the_run_and_names_the_step(tmp_path):
    def broken(weights, data, key):
        value, metrics = loss(weights, data, key)
        return jnp.where(jax.random.uniform(key) < 0.1, jnp.nan, value), metrics

    with pytest.raises(FloatingPointError, match="the loss is nan at step"):
        run(tmp_path, loss=broken)


def test_a_folder_of_another_recipe_is_refused(tmp_path):
    claim(tmp_path, TINY)
    claim(tmp_path, TINY)
    with pytest.raises(ValueError, match=r"seed: 0 there, 1 here"):
        claim(tmp_path, dataclasses.replace(TINY, seed=1))
