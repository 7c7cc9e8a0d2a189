"""The choice of the trees beside the number of live slots: a simulated H200 serves Qwen3-8B to many."""

from typing import NamedTuple

import numpy as np
import pytest

from jetspec_jax.engine.budget_policy import AutoBudget, LiveSlot
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.round_costs import complete_costs, timed_pairs

BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LIVES = (1, 2, 4, 8, 16, 32, 64)
SHAPES = [(live, bucket) for live in LIVES for bucket in BUCKETS if live * bucket <= 1024]
#: Milliseconds of rounds of 1, 16, 32 and 64 nodes by live slots, as measured.
MS = {
    1: (4.5, 6.0, 6.2, 6.1),
    8: (4.6, 8.0, 9.9, 16.2),
    32: (6.1, 21.7, 32.7, 61.7),
    64: (8.0, 40.1, 65.7, 123.7),
}
#: Tokens of a round by bucket: of texts that are easy to draft, and of hard ones.
TAU = {
    "easy": (1, 1.9, 3.3, 5.2, 7.7, 8.6, 9.1, 9.9, 10.8),
    "hard": (1, 1.5, 1.9, 2.3, 2.6, 2.8, 3.0, 3.1, 3.2),
}
DISPATCH, NOISE, WRONG, DISPATCHES = 0.6e-3, 0.02, 0.03, 100


def true_costs():
    known = {
        (live, bucket): (1e-3 * each,) * 2
        for live, own in MS.items()
        for bucket, each in zip((1, 16, 32, 64), own, strict=True)
    }
    return complete_costs((64, 1024), known, dict.fromkeys(known, DISPATCH), SHAPES)


def measured(costs, rng):
    """The costs as an engine measures them: of some shapes, and not quite right."""
    timed = {
        shape: tuple(own * np.exp(rng.normal(0, WRONG)) for own in costs.seconds[shape])
        for shape in timed_pairs(SHAPES)
    }
    return complete_costs(costs.contexts, timed, dict.fromkeys(timed, DISPATCH), SHAPES)


class Run(NamedTuple):
    record: DispatchRecord
    seconds: float
    tokens: int


def run_dispatch(live, bucket, rounds, tau, costs, rng):
    """Rounds whose drafts the head judges well on average; a larger tree has accepted no less."""
    index = BUCKETS.index(bucket)
    luck = rng.random((rounds, live, 1))
    drafted = np.asarray(tau[1 : index + 1]) - 1
    accepted = np.floor(np.log(luck) / np.log(drafted / (1 + drafted)))
    seconds = (DISPATCH + rounds * costs.at((live, bucket), 500, np.inf)) * np.exp(rng.normal(0, NOISE))
    sizes = np.full((rounds, live), bucket, np.int32)
    reach = (np.broadcast_to(drafted, accepted.shape).astype(np.float32), accepted.astype(np.float32))
    tokens = np.zeros((rounds, live, 1), np.int32)
    record = DispatchRecord(
        bucket, tuple(range(live)), seconds, tokens, sizes, *(reach if index else (None, None))
    )
    return Run(record, seconds, rounds * live * tau[index])


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("sliced", [False, True])
@pytest.mark.parametrize("kind", TAU)
def test_close_to_the_best_bucket_for_any_number_of_slots(kind, sliced):
    costs, tau, rng = true_costs(), TAU[kind], np.random.default_rng(0)
    policy = AutoBudget(BUCKETS, measured(costs, rng), 0.01, sliced=sliced)
    best, shares = {}, {}
    for live in (*LIVES, *reversed(LIVES)):
        rates = {
            bucket: own * live / (costs.at((live, bucket), 500, 32))
            for bucket, own in zip(BUCKETS, tau, strict=True)
            if (live, bucket) in costs.seconds
        }
        best[live] = max(rates, key=rates.__getitem__)
        seconds = tokens = 0
        for _ in range(DISPATCHES):
            slots = [LiveSlot(500, 5000, sampled=False, watched=False)] * live
            bucket, rounds = policy.choose(slots, 0)
            run = run_dispatch(live, bucket, rounds, tau, costs, rng)
            policy.observe(run.record)
            seconds, tokens = seconds + run.seconds, tokens + run.tokens
        shares[live] = tokens / seconds / rates[best[live]]
    # The simulation is of some use: plain, small and large trees each have their place.
    assert len(set(best.values())) >= 3
    assert min(shares.values()) > 0.96, (best, shares)
