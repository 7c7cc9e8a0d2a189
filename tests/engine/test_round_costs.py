"""What rounds cost: measured with dispatches that are handed in."""

import numpy as np
import pytest

from jetspec_jax.engine.round_costs import REPEATS, RoundCosts, measure_round_costs, timed_contexts

CONTEXTS, ROUNDS = (64, 1024), 16


class Machine:
    """Rounds of `bucket` milliseconds and a little more for each committed token; keeps what it was asked."""

    def __init__(self, wrong=lambda call: 0.0):
        self.calls, self._wrong = [], wrong

    def __call__(self, bucket, context, rounds):
        self.calls.append((bucket, context, rounds))
        return 0.3e-3 + rounds * self.round(bucket, context) + self._wrong(len(self.calls))

    def round(self, bucket, context):
        return 1e-3 * bucket + 1e-6 * context


def assert_right(costs, machine, buckets):
    assert costs.contexts == CONTEXTS
    for bucket in buckets:
        for context in (64, 500, 1024, 2000):
            right = machine.round(bucket, context) + 0.3e-3 / 8
            np.testing.assert_allclose(costs.at(bucket, context, 8), right, rtol=1e-6)


def test_tells_rounds_from_dispatches():
    machine = Machine()
    assert_right(measure_round_costs(machine, (1, 16, 32), CONTEXTS, ROUNDS), machine, (1, 16, 32))


def test_compiles_everything_before_it_times_anything():
    """A first call takes long, and so do a few later ones: medians do not care."""
    machine = Machine(lambda call: 100.0 if call <= 3 or call % 23 == 0 else 0.0)
    assert_right(measure_round_costs(machine, (1, 16, 32), CONTEXTS, ROUNDS), machine, (1, 16, 32))
    assert [bucket for bucket, _, _ in machine.calls[:3]] == [1, 16, 32]


def test_interleaves_buckets_and_keeps_long_rounds_few():
    machine = Machine()
    measure_round_costs(machine, (1, 256), CONTEXTS, ROUNDS)
    repeats = [machine.calls[-8 * (k + 1) : len(machine.calls) - 8 * k] for k in range(REPEATS)]
    assert all(own == repeats[0] for own in repeats)
    assert {(bucket, context) for bucket, context, _ in repeats[0]} == {
        (b, c) for b in (1, 256) for c in CONTEXTS
    }
    assert {(bucket, rounds) for bucket, _, rounds in repeats[0]} == {(1, 1), (1, ROUNDS), (256, 1), (256, 4)}


def test_noise_makes_nothing_negative():
    rng = np.random.default_rng(0)
    machine = Machine(lambda _: rng.normal(0, 0.1))
    costs = measure_round_costs(machine, (1, 16), CONTEXTS, ROUNDS)
    assert min(min(own) for own in costs.seconds.values()) > 0
    assert min(costs.dispatches.values()) >= 0


def test_a_short_dispatch_pays_more_of_it_each_round():
    costs = RoundCosts((100, 300), {1: (1.0, 2.0), 16: (4.0, 4.0)}, {1: 8.0, 16: 4.0})
    np.testing.assert_allclose([costs.at(bucket, 200, 16) for bucket in (1, 16)], [1.5 + 0.5, 4.0 + 0.25])
    np.testing.assert_allclose([costs.at(bucket, 400, 2) for bucket in (1, 16)], [2.5 + 4.0, 4.0 + 2.0])
    assert costs.at(1, -10_000, 16) > 0


@pytest.mark.parametrize("capacity", [64, 128, 320, 384, 1024, 40_960])
def test_are_timed_far_apart_and_within_a_slot(capacity):
    most = 16
    low, high, rounds = timed_contexts(capacity, 16, most)
    assert high - low >= capacity // 4
    assert rounds >= 2
    assert high + rounds * most <= capacity
    assert (capacity < 512) == (rounds < 16)
