"""Policies for the bucket and the rounds of a dispatch, by themselves and in a simulation."""

import math

import numpy as np
import pytest

from jetspec_jax.engine.acceptance import AcceptanceEstimate
from jetspec_jax.engine.budget_policy import (
    MAX_ROUNDS,
    PROBE_ROUNDS,
    AutoBudget,
    Dispatch,
    FixedBudget,
    LiveSlot,
    of_use,
    rounds_for,
)
from jetspec_jax.engine.pace import Pace
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.round_costs import RoundCosts
from tests.engine import budget_simulation

BUCKETS = (1, 16, 32, 64, 128, 256)
LIVE = [LiveSlot(300, 5000, False, False)]


def slot(left=5000, sampled=False, watched=False, fresh=False, budget=None):
    return LiveSlot(300, left, sampled, watched, fresh, budget)


def costs_of(*seconds, dispatch=0.0, lives=(1, 2, 3)):
    """The same for any number of live slots."""
    own = dict(zip(BUCKETS[: len(seconds)], seconds, strict=True))
    shapes = {(live, bucket): (one, one) for live in lives for bucket, one in own.items()}
    return RoundCosts((64, 768), shapes, dict.fromkeys(shapes, dispatch))


def auto_of(*seconds, dispatch=0.0, probing=0.0):
    return AutoBudget(BUCKETS[: len(seconds)], costs_of(*seconds, dispatch=dispatch), probing)


def record_of(bucket, rounds, drafted=(), seconds=None, slots=1):
    """A dispatch of which every tree had so many drafted tokens accepted, and was expected to."""
    tokens = np.full((rounds, slots, 16), -1, np.int32)
    tokens[..., 0] = 7
    sizes = np.full((rounds, slots), bucket, np.int32)
    reach = np.broadcast_to(np.asarray(drafted, np.float32), (rounds, slots, len(drafted)))
    live = tuple(range(slots))
    return DispatchRecord(
        bucket, live, seconds, tokens, sizes, *((reach, reach) if drafted else (None, None))
    )


def teach(policy, drafted, sampled=False):
    """Trees of all buckets have had so many drafted tokens accepted for long."""
    policy.choose([slot(sampled=sampled)], 0)
    for _ in range(3):
        policy.observe(record_of(BUCKETS[len(drafted)], 2048, drafted))


class TestRounds:
    def test_what_one_dispatch_can_finish_is_not_cut_in_two(self):
        assert [rounds_for([slot(left)], 0) for left in (1, 256, 257, 4000)] == [1, 256, 64, 64]
        assert rounds_for([slot(3), slot(200)], 0) == 200

    def test_nobody_waits_long_for_a_slot_that_may_end(self):
        assert rounds_for([slot(), slot()], 1) == 16
        assert rounds_for([slot(200)], 1) == 200
        assert rounds_for([slot(), slot(watched=True)], 0) == 16

    def test_at_least_one_even_if_nobody_decodes(self):
        assert rounds_for([], 0) == 1


def test_a_fixed_budget_stays():
    policy = FixedBudget(64)
    assert policy.choose([slot(40)], 0) == Dispatch(64, 40)
    policy.observe(record_of(64, 40, (9.0, 9.0, 9.0), seconds=100.0))
    assert policy.choose([slot(40)], 0) == Dispatch(64, 40)


class TestAuto:
    def test_with_equal_costs_the_most_tokens_win(self):
        policy = auto_of(1.0, 1.0, 1.0, 1.0)
        teach(policy, (0.1, 0.2, 0.4))
        assert policy.choose(LIVE, 0).bucket == 64

    @pytest.mark.parametrize(
        ("seconds", "best"), [((1, 2.5, 9, 9), 16), ((1, 3.5, 3.8, 9), 32), ((1, 9, 9, 9), 1)]
    )
    def test_tokens_are_weighed_against_seconds(self, seconds, best):
        policy = auto_of(*seconds)
        teach(policy, (2.0, 3.0, 4.0))
        assert policy.choose(LIVE, 0).bucket == best

    def test_the_last_token_needs_no_tree(self):
        policy = auto_of(1.0, 1.1)
        teach(policy, (2.0,))
        assert policy.choose([slot(1)], 0) == Dispatch(1, 1)
        assert policy.choose([slot(1), slot(100)], 0).bucket == 16

    def test_a_dispatch_of_few_rounds_weighs_what_launching_costs(self):
        policy = auto_of(1.0, 2.3, dispatch=30.0)
        teach(policy, (1.0,))
        # Trees are slower, but a launch brings twice as many tokens.
        assert policy.choose(LIVE, 0).bucket == 16
        policy = auto_of(1.0, 2.3, dispatch=1.0)
        teach(policy, (1.0,))
        assert policy.choose(LIVE, 0).bucket == 1

    @pytest.mark.parametrize("buckets", [1, 2, 4, 6])
    @pytest.mark.parametrize("seed", range(3))
    def test_never_leaves_its_buckets_nor_its_rounds(self, buckets, seed):
        rng = np.random.default_rng(seed)
        policy = auto_of(*rng.uniform(0.1, 2.0, buckets), dispatch=0.1, probing=0.5)
        for _ in range(50):
            live = [slot(int(left), sampled=bool(rng.integers(2))) for left in rng.integers(1, 600, 3)]
            waiting = int(rng.integers(2))
            bucket, rounds = policy.choose(live, waiting)
            assert bucket in BUCKETS[:buckets]
            assert 1 <= rounds <= rounds_for(live, waiting)
            drafted = tuple(np.sort(rng.uniform(0, 9, BUCKETS.index(bucket))))
            seconds = float(rng.uniform(0.1, 100.0)) if rng.integers(2) else None
            policy.observe(record_of(bucket, rounds, drafted, seconds, slots=3))

    def test_plain_rounds_tell_their_pace(self):
        policy = auto_of(1.0, 1.2)
        policy.choose(LIVE, 0)
        for _ in range(100):
            policy.observe(record_of(1, 32, seconds=32 * 0.5))
            policy.observe(record_of(1, 32))
        np.testing.assert_allclose(policy._pace.seconds((1, 1), 300, 32), 0.5, rtol=0.01)

    def test_greedy_and_sampled_requests_are_told_apart(self):
        policy = auto_of(1.0, 1.5)
        for sampled, drafted in ((False, 3.0), (True, 0.1)):
            teach(policy, (drafted,), sampled)
        assert policy.choose([slot()], 0).bucket == 16
        assert policy.choose([slot(sampled=True)], 0).bucket == 1
        assert policy.choose([slot(), slot(sampled=True)], 0).bucket == 1

    def test_slots_that_do_not_decode_tell_nothing(self):
        one, two = (AutoBudget(BUCKETS[:2], costs_of(1.0, 1.2, lives=(live,)), 0.0) for live in (1, 2))
        for _ in range(50):
            alone = record_of(16, 8, (2.0,), seconds=9.0)
            one.observe(alone)
            # A second slot, and eight more rounds, in which nobody decoded; what they hold is nothing.
            wide = [
                np.pad(own, [(0, 8), (0, 1), (0, 0)], constant_values=5)
                for own in (alone.expected, alone.accepted)
            ]
            sizes = np.pad(alone.tree_sizes, [(0, 8), (0, 1)])
            tokens = np.pad(alone.tokens, [(0, 8), (0, 1), (0, 0)], constant_values=-1)
            two.observe(DispatchRecord(16, (0, 1), 9.0, tokens, sizes, *wide))
            assert one.choose(LIVE, 0) == two.choose(LIVE, 0)
        assert one._choice.acceptance.tokens() == two._choice.acceptance.tokens()
        assert one._pace.seconds((1, 16), 300, 8) == two._pace.seconds((2, 16), 300, 8)

    def test_a_dispatch_in_which_nobody_decoded_changes_nothing(self):
        policy = auto_of(1.0, 2.0, 3.0)
        before = policy._choice.acceptance.tokens(), policy._pace.seconds((1, 32), 300, 8)
        for bucket, drafted in ((1, ()), (32, (0.0, 0.0))):
            record = record_of(bucket, 16, drafted, seconds=1.0)
            policy.observe(record._replace(tree_sizes=np.zeros_like(record.tree_sizes)))
        assert (policy._choice.acceptance.tokens(), policy._pace.seconds((1, 32), 300, 8)) == before

    def test_follows_a_bucket_that_got_slower(self):
        policy = auto_of(9.0, 1.0, 1.1, probing=0.02)
        teach(policy, (2.0, 2.0))
        seconds, drafted, chosen = {16: 1.6, 32: 1.1}, {16: (2.0,), 32: (2.0, 2.0)}, []
        for _ in range(150):
            bucket, rounds = policy.choose(LIVE, 0)
            chosen.append(bucket)
            policy.observe(record_of(bucket, rounds, drafted[bucket], rounds * seconds[bucket]))
        assert chosen[0] == 16
        assert set(chosen[-20:]) == {32}

    def test_unknown_trees_are_tried_for_a_few_rounds(self):
        policy = auto_of(1.0, 1.1, 1.2)
        bucket, rounds = policy.choose(LIVE, 0)
        assert (bucket > 1, rounds) == (True, PROBE_ROUNDS)
        teach(policy, (2.0, 3.0))
        assert policy.choose(LIVE, 0).rounds > PROBE_ROUNDS


class TestSlices:
    """Dispatches of so much time."""

    def rounds(self, seconds, dispatch=0.0, live=1, waiting=0, **changes):
        costs = RoundCosts((64, 768), {(live, 16): (seconds, seconds)}, {(live, 16): dispatch})
        policy = FixedBudget(16, costs)
        return policy.choose([slot(**changes)] * live, waiting).rounds

    def test_as_many_rounds_as_fit(self):
        assert [self.rounds(own) for own in (0.0101, 0.005, 0.0011)] == [3, 8, 36]
        assert [self.rounds(own, waiting=2) for own in (0.0101, 0.005, 0.0011)] == [1, 3, 13]

    def test_one_at_least_and_no_more_than_are_left(self):
        assert self.rounds(0.5) == 1
        assert self.rounds(0.001, left=7) == 7
        assert self.rounds(1e-6) == MAX_ROUNDS

    def test_what_a_dispatch_takes_itself_is_a_small_share(self):
        for seconds, dispatch in ((0.001, 0.001), (0.003, 0.0007), (0.0001, 0.00005)):
            rounds = self.rounds(seconds, dispatch, waiting=1)
            assert dispatch / (dispatch + rounds * seconds) <= 0.03
            assert rounds * seconds >= 0.013

    def test_it_is_never_long_for_that(self):
        assert self.rounds(0.0101, 0.5) == 19
        assert self.rounds(0.5, 0.5) == 1

    def test_a_first_token_does_not_wait_for_a_second_round(self):
        assert self.rounds(0.001, fresh=True) == 1
        assert self.rounds(0.001, 0.01, fresh=True, waiting=3) == 1

    def test_rounds_are_those_of_the_live_slots(self):
        shapes = {(live, 16): (0.001 * live,) * 2 for live in (1, 4, 8)}
        policy = FixedBudget(16, RoundCosts((64, 768), shapes, dict.fromkeys(shapes, 0.0)))
        assert [policy.choose([slot()] * live, 0).rounds for live in (1, 2, 4, 5, 8)] == [40, 10, 10, 5, 5]

    def test_a_fixed_budget_learns_its_pace(self):
        policy = FixedBudget(16, costs_of(1.0, 0.001))
        for _ in range(100):
            policy.choose([slot()], 0)
            policy.observe(record_of(16, 20, (1.0,), seconds=20 * 0.002))
        assert policy.choose([slot()], 0).rounds in (19, 20)

    def test_auto_fills_a_slice_with_rounds_of_its_choice(self):
        policy = AutoBudget(BUCKETS[:2], costs_of(0.002, 0.004), 0.0, sliced=True)
        for drafted, expected in ((3.0, Dispatch(16, 10)), (0.1, Dispatch(1, 20))):
            teach(policy, (drafted,))
            assert policy.choose([slot()], 0) == expected
        assert policy.choose([slot()], 1) == Dispatch(1, 7)
        assert policy.choose([slot(), slot(fresh=True)], 0) == Dispatch(1, 1)

    def test_probes_keep_the_share_of_a_dispatch(self):
        policy = AutoBudget(BUCKETS[:2], costs_of(1e-4, 5e-4, dispatch=2e-4), 0.1, sliced=True)
        teach(policy, (0.0,))
        for _ in range(100):
            bucket, rounds = policy.choose([slot()], 0)
            assert 2e-4 / (2e-4 + rounds * {1: 1e-4, 16: 5e-4}[bucket]) <= 0.03
            policy.observe(record_of(bucket, rounds, (0.0,) if bucket > 1 else ()))


class TestLiveSlots:
    def shapes(self):
        """Rows cost as much as a plain step where there are 64 of them; 8 slots have no trees of 32."""
        shapes = {
            (live, bucket): 1.0 + live * bucket / 64
            for live in (1, 8, 64)
            for bucket in BUCKETS[:3]
            if live * bucket <= 1024 and (live, bucket) != (8, 32)
        }
        pairs = {shape: (own, own) for shape, own in shapes.items()}
        return RoundCosts((64, 768), pairs, dict.fromkeys(pairs, 0.0))

    def test_trees_shrink_as_slots_fill(self):
        policy = AutoBudget(BUCKETS[:3], self.shapes(), 0.0)
        teach(policy, (1.0, 1.5))
        chosen = [policy.choose([slot()] * live, 0).bucket for live in (1, 8, 64)]
        assert chosen == [32, 1, 1]
        teach(policy, (4.0, 9.0))
        chosen = [policy.choose([slot()] * live, 0).bucket for live in (1, 2, 8, 9, 64)]
        # Where there is no larger program, the largest that there is.
        assert chosen == [32, 16, 16, 1, 1]

    def test_probes_stay_among_the_programs(self):
        policy = AutoBudget(BUCKETS[:3], self.shapes(), 1.0)
        seen = set()
        for _ in range(50):
            bucket, rounds = policy.choose([slot()] * 8, 0)
            seen.add(bucket)
            drafted = (0.0, 0.0)[: BUCKETS.index(bucket)]
            policy.observe(record_of(bucket, rounds, drafted, slots=8))
        assert seen == {1, 16}


class TestProbing:
    @pytest.mark.parametrize("share", [0.0, 0.01, 0.1])
    def test_loses_its_share_of_the_time(self, share):
        """Trees never pay here: a probe comes when plain rounds have earned it, and then it does come."""
        policy = auto_of(1.0, 5.0, probing=share)
        teach(policy, (0.0,))
        plain = lost = 0.0
        for _ in range(400):
            bucket, rounds = policy.choose(LIVE, 0)
            if bucket == 1:
                plain += rounds
            else:
                assert rounds == PROBE_ROUNDS
                lost += rounds * (5.0 - 1.0)
            policy.observe(record_of(bucket, rounds, (0.0,) if bucket > 1 else ()))
        # The rounds that taught it have earned the first.
        assert lost <= share * plain + (share > 0) * PROBE_ROUNDS * (5.0 - 1.0)
        assert lost > share * plain - 1.1 * PROBE_ROUNDS * (5.0 - 1.0), "all but what the next one will"

    def test_tries_a_larger_bucket_than_the_best(self):
        policy = auto_of(9.0, 1.0, 1.5, probing=0.05)
        teach(policy, (2.0, 2.0))
        chosen = set()
        for _ in range(100):
            bucket, rounds = policy.choose(LIVE, 0)
            chosen.add(bucket)
            policy.observe(record_of(bucket, rounds, (2.0, 2.0)[: BUCKETS.index(bucket)]))
        assert chosen == {16, 32}

    def test_brings_trees_back_when_a_text_gets_easy(self):
        policy = auto_of(1.0, 2.0, probing=0.02)
        teach(policy, (0.1,))
        rounds_until = 0
        while True:
            bucket, rounds = policy.choose(LIVE, 0)
            policy.observe(record_of(bucket, rounds, (4.0,) if bucket > 1 else ()))
            if bucket > 1 and rounds > PROBE_ROUNDS:
                break
            rounds_until += rounds
        assert rounds_until < 1000


class TestAcceptance:
    def learn(self, acceptance, expected, accepted, rounds=8):
        acceptance.learn(*(np.tile(np.asarray(own, np.float32), (rounds, 1)) for own in (expected, accepted)))

    def test_learns_the_mean_of_what_it_saw(self):
        acceptance = AcceptanceEstimate((16, 32))
        for _ in range(100):
            self.learn(acceptance, [1.0, 1.5], [1, 2])
            self.learn(acceptance, [1.0, 1.5], [3, 4])
        np.testing.assert_allclose(acceptance.tokens(), [1.0, 3.0, 4.0], rtol=0.02)

    def test_follows_what_the_head_expects_and_corrects_it(self):
        acceptance = AcceptanceEstimate((16,))
        self.learn(acceptance, [4.0], [2], rounds=8192)
        self.learn(acceptance, [1.0], [0.5], rounds=16)
        lately = 1.0 + 3.0 * math.exp(-16 / 16)
        np.testing.assert_allclose(acceptance.tokens(), [1.0, 1.0 + 0.5 * lately], rtol=1e-3)

    def test_while_nothing_drafts_the_text_is_taken_for_what_texts_were(self):
        acceptance = AcceptanceEstimate((16,))
        self.learn(acceptance, [4.0], [4], rounds=8192)
        self.learn(acceptance, [1.0], [1], rounds=64)
        _, lately = acceptance.tokens()
        for_long = 5.0 - 3.0 * -math.expm1(-64 / 512)
        acceptance.fade(128)
        np.testing.assert_allclose(
            acceptance.tokens()[1], for_long + (lately - for_long) * math.exp(-1), rtol=1e-3
        )
        acceptance.fade(10_000)
        np.testing.assert_allclose(acceptance.tokens()[1], for_long, rtol=1e-3)

    def test_larger_trees_than_were_seen_move_along(self):
        acceptance = AcceptanceEstimate((16, 32))
        self.learn(acceptance, [0.5], [1], rounds=4096)
        # 32 nodes were guessed to have a quarter more accepted than 16.
        np.testing.assert_allclose(acceptance.tokens(), [1.0, 2.0, 2.25], rtol=0.02)

    def test_nothing_accepted_at_all(self):
        acceptance = AcceptanceEstimate((16, 32))
        self.learn(acceptance, [0.0, 0.0], [0, 0], rounds=8192)
        np.testing.assert_allclose(acceptance.tokens(), 1.0, atol=1e-3)


class TestPace:
    def learn(self, pace, bucket, slower, dispatches=100):
        for _ in range(dispatches):
            pace.learn((1, bucket), 300, 32, slower * 32 * pace.costs.at((1, bucket), 300, 32))

    def test_a_slow_machine_slows_all_buckets(self):
        pace = Pace(costs_of(1.0, 2.0, 3.0))
        self.learn(pace, 16, 1.5)
        np.testing.assert_allclose(pace.seconds((1, 16), 300, 32), 3.0, rtol=0.01)
        np.testing.assert_allclose([pace.seconds((1, b), 300, 32) for b in (1, 32)], [1.4, 4.2], rtol=0.05)

    def test_each_bucket_has_its_own(self):
        pace = Pace(costs_of(1.0, 2.0, 3.0))
        for _ in range(300):
            for bucket, slower in ((1, 1.0), (16, 1.1), (32, 0.9)):
                self.learn(pace, bucket, slower, 1)
        np.testing.assert_allclose(
            [pace.seconds((1, b), 300, 32) for b in (1, 16, 32)], [1.0, 2.2, 2.7], rtol=0.02
        )

    def test_a_guess_is_corrected_by_itself(self):
        costs = costs_of(1.0, 2.0, 3.0)
        pace = Pace(RoundCosts(costs.contexts, costs.seconds, costs.dispatches, frozenset({(1, 16)})))
        self.learn(pace, 16, 1.5)
        np.testing.assert_allclose(pace.seconds((1, 16), 300, 32), 3.0, rtol=0.01)
        assert pace.seconds((1, 32), 300, 32) < 1.15 * 3.0

    def test_outlives_an_interruption_and_forgets_a_busy_machine(self):
        pace = Pace(costs_of(1.0, 2.0))
        pace.learn((1, 1), 300, 16, 1000.0)
        np.testing.assert_allclose(pace.seconds((1, 1), 300, 16), 1.0, rtol=0.05)
        self.learn(pace, 16, 3.0)
        self.learn(pace, 1, 1.0, 300)
        np.testing.assert_allclose([pace.seconds((1, b), 300, 16) for b in (1, 16)], [1.0, 2.0], rtol=0.3)


@pytest.mark.parametrize("kind", budget_simulation.KINDS)
def test_close_to_the_best_bucket_and_never_far_from_plain(kind):
    """Of Qwen3-8B on an H200, with real acceptance; on average of all sessions."""
    alone, own = budget_simulation.fixed(kind), budget_simulation.auto(kind)
    assert min(alone.values()) / own >= 0.94
    assert alone[1] / own >= 0.94


class TestOwnBudgets:
    """Requests that want smaller trees than the engine has, or none."""

    def test_buckets_up_to_the_first_that_holds_the_largest_budget(self):
        buckets = (1, 4, 16, 64)
        assert [list(of_use(buckets, [slot(budget=own)])) for own in (1, 2, 4, 5, 64, None)] == [
            [1],
            [1, 4],
            [1, 4],
            [1, 4, 16],
            [1, 4, 16, 64],
            [1, 4, 16, 64],
        ]
        assert list(of_use(buckets, [slot(budget=1), slot(budget=16)])) == [1, 4, 16]
        assert of_use(buckets, []) == buckets

    def test_a_fixed_budget_is_plain_where_nobody_wants_trees(self):
        policy = FixedBudget(64, plain=True)
        assert policy.choose([slot(budget=1)] * 2, 0).bucket == 1
        assert policy.choose([slot(budget=1), slot(budget=2)], 0).bucket == 64
        assert FixedBudget(64).choose([slot(budget=1)], 0).bucket == 64

    def test_auto_chooses_no_larger_trees_than_wanted(self):
        policy = auto_of(1.0, 1.0, 1.0, 1.0)
        teach(policy, (2.0, 3.0, 4.0))
        assert policy.choose(LIVE, 0).bucket == 64
        for budget, bucket in ((1, 1), (16, 16), (17, 32)):
            assert policy.choose([slot(budget=budget)], 0).bucket == bucket
