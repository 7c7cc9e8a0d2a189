"""What rounds cost: measured with dispatches that are handed in."""

import numpy as np
import pytest

from jetspec_jax.engine.round_costs import (
    LEAST_REPEATS,
    MOST_TIMED,
    REPEATS,
    RoundCosts,
    complete_by_rows,
    complete_costs,
    measure_round_costs,
    measured_at_once,
    timed_contexts,
    timed_pairs,
)

CONTEXTS, ROUNDS = (64, 1024), 16
ONE = [(1, bucket) for bucket in (1, 16, 32)]
# As an engine of 64 slots has them: no more than 1,024 rows.
MANY = [
    (live, bucket)
    for live in (1, 2, 4, 8, 16, 32, 64)
    for bucket in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    if live * bucket <= 1024
]


class Machine:
    """Rounds of 4 ms, of more for each slot, row and committed token; keeps what it was asked."""

    def __init__(self, wrong=lambda call: 0.0):
        self.calls, self._wrong = [], wrong

    def __call__(self, pair, context, rounds):
        self.calls.append((pair, context, rounds))
        return 0.3e-3 + rounds * self.round(pair, context) + self._wrong(len(self.calls))

    def round(self, pair, context):
        live, bucket = pair
        drafting = 1.5e-3 + 0.1e-3 * live if bucket > 1 else 0.0
        return 4e-3 + drafting + 1e-3 * live * bucket + 1e-6 * context


def assert_right(costs, machine, pairs):
    assert costs.contexts == CONTEXTS
    assert set(costs.seconds) == set(costs.dispatches) == set(pairs)
    for pair in pairs:
        for context in (64, 500, 1024, 2000):
            right = machine.round(pair, context) + 0.3e-3 / 8
            np.testing.assert_allclose(costs.at(pair, context, 8), right, rtol=1e-6)


def test_tells_rounds_from_dispatches():
    machine = Machine()
    assert_right(measured_at_once(measure_round_costs(machine, ONE, CONTEXTS, ROUNDS)), machine, ONE)


def test_compiles_everything_before_it_times_anything():
    """A first call takes long, and so do a few later ones: medians do not care."""
    machine = Machine(lambda call: 100.0 if call <= 3 or call % 23 == 0 else 0.0)
    assert_right(measured_at_once(measure_round_costs(machine, ONE, CONTEXTS, ROUNDS)), machine, ONE)
    assert [pair for pair, _, _ in machine.calls[:3]] == ONE


def test_interleaves_shapes_and_keeps_long_rounds_few():
    machine, ends = Machine(), [(1, 1), (1, 32)]
    measured_at_once(measure_round_costs(machine, ends, CONTEXTS, ROUNDS))
    repeats = [machine.calls[-8 * (k + 1) : len(machine.calls) - 8 * k] for k in range(REPEATS)]
    assert all(own == repeats[0] for own in repeats)
    assert {(pair, context) for pair, context, _ in repeats[0]} == {(p, c) for p in ends for c in CONTEXTS}
    turns = {(pair, rounds) for pair, _, rounds in repeats[0]}
    assert turns == {(pair, 1) for pair in ends} | {((1, 1), 10), ((1, 32), 4)}


def test_the_longer_rounds_are_the_less_often_they_are_timed():
    machine = Machine(lambda call: 10.0)
    measured_at_once(measure_round_costs(machine, ONE, CONTEXTS, ROUNDS))
    timed = len(machine.calls) - 2 * len(ONE)
    assert timed == LEAST_REPEATS * 2 * 2 * len(ONE)


class TestManyShapes:
    """Of many shapes a few are timed, and the others lie between them."""

    def test_a_few_are_timed(self):
        pairs = timed_pairs(MANY)
        assert len(MANY) == 53
        trees = [pair for pair in pairs if pair[1] > 1]
        assert len(trees) < MOST_TIMED
        assert {live for live, _ in trees} == {1, 8, 64}
        assert {pair for pair in pairs if pair[1] == 1} == {pair for pair in MANY if pair[1] == 1}
        # Plain rounds, the smallest trees and the largest, of the most slots and of the fewest.
        assert {(1, 1), (1, 2), (1, 256), (64, 1), (64, 2), (64, 16)} <= set(pairs)
        assert set(timed_pairs(reversed(ONE))) == set(ONE)

    def test_all_are_right_where_slots_and_rows_cost_alike(self):
        machine = Machine()
        costs = measured_at_once(measure_round_costs(machine, MANY, CONTEXTS, ROUNDS))
        assert [pair for pair, _, _ in machine.calls[: len(MANY)]] == MANY
        assert {pair for pair, _, _ in machine.calls[len(MANY) :]} == set(timed_pairs(MANY))
        assert_right(costs, machine, MANY)
        assert costs.guessed == set(MANY) - set(timed_pairs(MANY))
        assert costs.buckets(64) == (1, 2, 4, 8, 16)

    def test_are_near_where_they_do_not(self):
        """Of Qwen3-8B on an H200: a floor at first, then rows. Seconds by slots and nodes, as measured."""
        ms = {
            1: (4.5, 6.0, 6.2, 6.1),
            8: (4.6, 8.0, 9.9, 16.2),
            32: (6.1, 21.7, 32.7, 61.7),
            64: (8, 40.1, 65.7, 123.7),
        }
        known = {
            (live, bucket): (1e-3 * each,) * 2
            for live, own in ms.items()
            for bucket, each in zip((1, 16, 32, 64), own, strict=True)
        }
        timed = {pair: own for pair, own in known.items() if pair[0] != 32 and pair[1] != 32}
        costs = complete_costs(CONTEXTS, timed, dict.fromkeys(timed, 0.0), known)
        for pair, (own, _) in known.items():
            np.testing.assert_allclose(costs.at(pair, 500, 8), own, rtol=0.25)
        assert costs.guessed == known.keys() - timed.keys()

    def test_noise_makes_nothing_negative(self):
        rng = np.random.default_rng(0)
        for pairs in (ONE, MANY):
            machine = Machine(lambda _: rng.normal(0, 0.1))
            costs = measured_at_once(measure_round_costs(machine, pairs, CONTEXTS, ROUNDS))
            assert min(min(own) for own in costs.seconds.values()) > 0
            assert min(costs.dispatches.values()) >= 0


def test_rows_tell_what_other_shapes_cost():
    """Of Qwen3-8B, in milliseconds, as measured on an H100, and on an H200 with 32 nodes."""
    ms = {(32, 1): 8.3, (32, 32): 32.7}
    seconds = {pair: (1e-3 * each, 1e-3 * each) for pair, each in ms.items()}
    first = RoundCosts((64, 256), seconds, dict.fromkeys(ms, 0.0))
    costs = complete_by_rows(first, [(1, 1), (1, 2), (1, 128), (8, 16), *ms])
    known = {(1, 128): 8.85, (8, 16): 9.92, **ms}
    for pair, each in known.items():
        np.testing.assert_allclose(costs.seconds[pair], 1e-3 * each, rtol=0.25)
    assert costs.seconds[1, 1] == costs.seconds[1, 2] == costs.seconds[32, 1]
    assert costs.guessed == {(1, 1), (1, 2), (1, 128), (8, 16)}
    plain = RoundCosts((64, 256), {(32, 1): (1.0, 2.0)}, {(32, 1): 0.5})
    assert complete_by_rows(plain, [(1, 1), (32, 1)]).at((1, 1), 64, 1) == 1.5


def test_a_short_dispatch_pays_more_of_it_each_round():
    seconds = {(1, 1): (1.0, 2.0), (1, 16): (4.0, 4.0)}
    costs = RoundCosts((100, 300), seconds, {(1, 1): 8.0, (1, 16): 4.0})
    np.testing.assert_allclose([costs.at(pair, 200, 16) for pair in seconds], [1.5 + 0.5, 4.0 + 0.25])
    np.testing.assert_allclose([costs.at(pair, 400, 2) for pair in seconds], [2.5 + 4.0, 4.0 + 2.0])
    assert costs.at((1, 1), -10_000, 16) > 0


@pytest.mark.parametrize("capacity", [64, 128, 320, 384, 1024, 40_960])
def test_are_timed_far_apart_and_within_a_slot(capacity):
    most = 16
    low, high, rounds = timed_contexts(capacity, 16, most)
    assert high - low >= capacity // 4
    assert rounds >= 2
    assert high + rounds * most <= capacity
    assert (capacity < 512) == (rounds < 16)
