"""Policies for the shape and the rounds of a dispatch, by themselves and in a simulation."""

import math

import numpy as np
import pytest

from jetspec_jax.engine.policy import (
    MAX_ROUNDS,
    PROBE_ROUNDS,
    AcceptanceEstimate,
    AutoBudget,
    FixedBudget,
    LiveSlot,
    RoundTimes,
    shapes_for,
)
from tests.engine import budget_simulation
from tests.engine.budget_simulation import dispatch

BUCKETS = (1, 16, 32, 64, 128, 256)
#: Seconds of the times below: a slice holds about a hundred rounds.
UNIT = 1e-3


def slot(left=5000, sampled=False, fresh=False, budget=None):
    return LiveSlot(left, sampled, fresh, budget)


LIVE = [slot()]


def choose(policy, live, waiting=0, forwards=()):
    """The bucket and the rounds; every shape has a program."""
    (_, bucket), rounds = policy.choose(live, waiting, forwards, lambda *shape: shape)
    return bucket, rounds


def bucket_of(policy, live, waiting=0):
    return choose(policy, live, waiting)[0]


def times_of(*seconds, lives=(1, 2, 3)):
    """By shape, in units: the same for any number of live slots."""
    return {(live, b): one for live in lives for b, one in zip(BUCKETS, seconds, strict=False)}


def auto_of(*seconds, probing=0.0, times=None, overlapped=False):
    """A policy that knows the seconds of all shapes."""
    times = times_of(*seconds) if times is None else times
    policy = AutoBudget(list(times), probing, overlapped=overlapped)
    know(policy, times)
    return policy


def know(policy, times):
    for shape, seconds in times.items():
        policy._times.learn(shape, 8, (), 8 * UNIT * seconds)


def record_of(bucket, rounds, drafted=(), seconds=None, slots=1, forwards=()):
    """A dispatch of which every tree had so many drafted tokens accepted, and was expected to."""
    tokens = np.full((rounds, slots, 16), -1, np.int32)
    tokens[..., 0] = 7
    sizes = np.full((rounds, slots), bucket, np.int32)
    reach = np.broadcast_to(np.asarray(drafted, np.float32), (rounds, slots, len(drafted)))
    live = tuple(range(slots))
    reach = (reach, reach) if drafted else (None, None)
    return dispatch(bucket, live, seconds, forwards, tokens, sizes, *reach)


def teach(policy, drafted, sampled=False):
    """Trees of all buckets have had so many drafted tokens accepted for long."""
    choose(policy, [slot(sampled=sampled)])
    for _ in range(3):
        policy.observe(record_of(BUCKETS[len(drafted)], 2048, drafted))


def test_a_fixed_budget_stays():
    policy = FixedBudget([(1, 64)])
    for _ in range(2):
        assert bucket_of(policy, [slot(40)]) == 64
        policy.observe(record_of(64, 40, (9.0, 9.0, 9.0), seconds=100.0))


class TestAuto:
    def test_with_equal_costs_the_most_tokens_win(self):
        policy = auto_of(1.0, 1.0, 1.0, 1.0)
        teach(policy, (0.1, 0.2, 0.4))
        assert bucket_of(policy, LIVE) == 64

    @pytest.mark.parametrize(
        ("seconds", "best"), [((1, 2.5, 9, 9), 16), ((1, 3.5, 3.8, 9), 32), ((1, 9, 9, 9), 1)]
    )
    def test_tokens_are_weighed_against_seconds(self, seconds, best):
        policy = auto_of(*seconds)
        teach(policy, (2.0, 3.0, 4.0))
        assert bucket_of(policy, LIVE) == best

    def test_the_last_token_needs_no_tree(self):
        policy = auto_of(1.0, 1.1)
        teach(policy, (2.0,))
        assert choose(policy, [slot(1)]) == (1, 1)
        assert bucket_of(policy, [slot(1), slot(100)]) == 16

    def test_rounds_share_the_time_of_a_prefill_before_them(self):
        policy = auto_of(1.0, 2.3, overlapped=True)
        teach(policy, (1.0,))
        assert bucket_of(policy, LIVE) == 1
        policy.observe(dispatch(1, (), 500 * UNIT, ((1, 128),)))
        # Trees are slower, but the prefill takes most of the time, and trees commit twice as many tokens.
        assert choose(policy, LIVE, forwards=[(1, 128)])[0] == 16

    @pytest.mark.parametrize("buckets", [1, 2, 4, 6])
    @pytest.mark.parametrize("seed", range(3))
    def test_never_leaves_its_buckets_nor_its_rounds(self, buckets, seed):
        rng = np.random.default_rng(seed)
        policy = auto_of(*rng.uniform(0.1, 2.0, buckets), probing=0.5)
        for _ in range(50):
            live = [slot(int(left), sampled=bool(rng.integers(2))) for left in rng.integers(1, 600, 3)]
            waiting = int(rng.integers(2))
            bucket, rounds = choose(policy, live, waiting)
            assert bucket in BUCKETS[:buckets]
            assert 1 <= rounds <= MAX_ROUNDS
            drafted = tuple(np.sort(rng.uniform(0, 9, BUCKETS.index(bucket))))
            seconds = UNIT * float(rng.uniform(0.1, 100.0)) if rng.integers(2) else None
            policy.observe(record_of(bucket, rounds, drafted, seconds, slots=3))

    def test_greedy_and_sampled_requests_are_told_apart(self):
        policy = auto_of(1.0, 1.5)
        for sampled, drafted in ((False, 3.0), (True, 0.1)):
            teach(policy, (drafted,), sampled)
        assert bucket_of(policy, [slot()]) == 16
        assert bucket_of(policy, [slot(sampled=True)]) == 1
        assert bucket_of(policy, [slot(), slot(sampled=True)]) == 1

    def test_slots_that_do_not_decode_tell_nothing(self):
        one, two = (auto_of(times=times_of(1.0, 1.2, lives=(live,))) for live in (1, 2))
        for _ in range(50):
            alone = record_of(16, 8, (2.0,), seconds=9 * UNIT)
            one.observe(alone)
            # A second slot, and eight more rounds, in which nobody decoded; what they hold is nothing.
            wide = [
                np.pad(own, [(0, 8), (0, 1), (0, 0)], constant_values=5)
                for own in (alone.expected, alone.accepted)
            ]
            sizes = np.pad(alone.tree_sizes, [(0, 8), (0, 1)])
            tokens = np.pad(alone.tokens, [(0, 8), (0, 1), (0, 0)], constant_values=-1)
            two.observe(dispatch(16, (0, 1), 9 * UNIT, (), tokens, sizes, *wide))
            assert choose(one, LIVE) == choose(two, LIVE)
        assert one._choice.acceptance.tokens() == two._choice.acceptance.tokens()
        assert one._times.seconds((1, 16)) == two._times.seconds((2, 16))

    def test_a_dispatch_in_which_nobody_decoded_changes_nothing(self):
        policy = auto_of(1.0, 2.0, 3.0)
        before = policy._choice.acceptance.tokens(), policy._times.seconds((1, 32))
        for bucket, drafted in ((1, ()), (32, (0.0, 0.0))):
            record = record_of(bucket, 16, drafted, seconds=UNIT)
            policy.observe(record._replace(tree_sizes=np.zeros_like(record.tree_sizes)))
        assert (policy._choice.acceptance.tokens(), policy._times.seconds((1, 32))) == before

    def test_follows_a_bucket_that_got_slower(self):
        policy = auto_of(9.0, 1.0, 1.1, probing=0.02)
        teach(policy, (2.0, 2.0))
        seconds, drafted, chosen = {16: 1.6, 32: 1.1}, {16: (2.0,), 32: (2.0, 2.0)}, []
        for _ in range(150):
            bucket, rounds = choose(policy, LIVE)
            chosen.append(bucket)
            policy.observe(record_of(bucket, rounds, drafted[bucket], rounds * UNIT * seconds[bucket]))
        assert chosen[0] == 16
        assert set(chosen[-20:]) == {32}

    def test_unknown_trees_are_tried_for_a_few_rounds(self):
        policy = auto_of(1.0, 1.1, 1.2)
        bucket, rounds = choose(policy, LIVE)
        assert (bucket > 1, rounds) == (True, PROBE_ROUNDS)
        teach(policy, (2.0, 3.0))
        assert choose(policy, LIVE)[1] > PROBE_ROUNDS


class TestSlices:
    """Dispatches of so much time."""

    def rounds(self, seconds, live=1, waiting=0, **changes):
        policy = FixedBudget([(live, 16)])
        policy._times.learn((live, 16), 8, (), 8 * seconds)
        return choose(policy, [slot(**changes)] * live, waiting)[1]

    def test_as_many_rounds_as_fit(self):
        assert [self.rounds(own) for own in (0.0101, 0.0051, 0.0011)] == [9, 19, 90]
        assert [self.rounds(own, waiting=2) for own in (0.0101, 0.0051, 0.0011)] == [1, 2, 13]
        assert self.rounds(0.0011, fresh=True) == 13, "a first token is due"

    def test_one_at_least_and_no_more_than_are_left(self):
        assert self.rounds(0.5) == 1
        assert self.rounds(0.001, left=7) == 7
        assert self.rounds(1e-6) == MAX_ROUNDS

    def test_overlapped_rounds_are_single(self):
        assert choose(FixedBudget([(1, 16)], overlapped=True), [slot()])[1] == 1

    def test_auto_fills_a_slice_with_rounds_of_its_choice(self):
        policy = auto_of(2.01, 4.01)
        for drafted, expected in ((3.0, (16, 24)), (0.1, (1, 49))):
            teach(policy, (drafted,))
            assert choose(policy, [slot()]) == expected
        assert choose(policy, [slot()], 1) == (1, 7)


class TestLiveSlots:
    def times(self):
        """Rows cost as much as a plain step where there are 64 of them; 8 slots have no trees of 32."""
        return {
            (live, bucket): 1.0 + live * bucket / 64
            for live in (1, 8, 64)
            for bucket in BUCKETS[:3]
            if live * bucket <= 1024 and (live, bucket) != (8, 32)
        }

    def test_trees_shrink_as_slots_fill(self):
        policy = auto_of(times=self.times())
        teach(policy, (1.0, 1.5))
        assert [bucket_of(policy, [slot()] * live) for live in (1, 8, 64)] == [32, 1, 1]
        teach(policy, (4.0, 9.0))
        # Where there is no larger program, the largest that there is.
        assert [bucket_of(policy, [slot()] * live) for live in (1, 2, 8, 9, 64)] == [32, 16, 16, 1, 1]

    def test_probes_stay_among_the_programs(self):
        policy = auto_of(times=self.times(), probing=1.0)
        seen = set()
        for _ in range(50):
            bucket, rounds = choose(policy, [slot()] * 8)
            seen.add(bucket)
            drafted = (0.0, 0.0)[: BUCKETS.index(bucket)]
            policy.observe(record_of(bucket, rounds, drafted, slots=8))
        assert seen == {1, 16}

    def test_the_shape_that_runs_is_asked_for_once(self):
        asked = []

        def shape_of(live, bucket):
            asked.append((live, bucket))
            return 64, 16

        assert auto_of(times=self.times()).choose([slot()] * 2, 0, (), shape_of)[0] == (64, 16)
        assert [live for live, _ in asked] == [8]


class TestProbing:
    @pytest.mark.parametrize("share", [0.0, 0.01, 0.1])
    def test_loses_its_share_of_the_time(self, share):
        """Trees never pay here: a probe comes when plain rounds have earned it, and then it does come."""
        policy = auto_of(2.5, 12.4, probing=share)  # a slice holds 40 plain rounds
        teach(policy, (0.0,))
        plain = lost = 0.0
        for _ in range(400):
            bucket, rounds = choose(policy, LIVE)
            if bucket == 1:
                plain += rounds
            else:
                assert rounds == PROBE_ROUNDS
                lost += rounds * (12.4 / 2.5 - 1.0)
            policy.observe(record_of(bucket, rounds, (0.0,) if bucket > 1 else ()))
        # The rounds that taught it have earned the first.
        assert lost <= share * plain + (share > 0) * PROBE_ROUNDS * (12.4 / 2.5 - 1.0)
        assert lost > share * plain - 1.1 * PROBE_ROUNDS * (12.4 / 2.5 - 1.0), (
            "all but what the next one will"
        )

    def test_tries_a_larger_bucket_than_the_best(self):
        policy = auto_of(9.0, 1.0, 1.5, probing=0.05)
        teach(policy, (2.0, 2.0))
        chosen = set()
        for _ in range(100):
            bucket, rounds = choose(policy, LIVE)
            chosen.add(bucket)
            policy.observe(record_of(bucket, rounds, (2.0, 2.0)[: BUCKETS.index(bucket)]))
        assert chosen == {16, 32}

    def test_brings_trees_back_when_a_text_gets_easy(self):
        policy = auto_of(1.0, 2.0, probing=0.02)
        teach(policy, (0.1,))
        rounds_until = 0
        while True:
            bucket, rounds = choose(policy, LIVE)
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


class TestTimes:
    def test_rounds_that_were_not_timed_lie_between_others_by_their_rows(self):
        times = RoundTimes()
        for (live, bucket), seconds in {(1, 1): 1.0, (1, 16): 2.0, (4, 16): 5.0}.items():
            times.learn((live, bucket), 8, (), 8 * seconds)
        found = [times.seconds(shape) for shape in ((2, 16), (1, 32), (8, 1), (1, 8), (8, 256))]
        np.testing.assert_allclose(found, [3.0, 3.0, 1.0, 2.0 * 200 / 208, 5.0])

    def test_the_first_rounds_of_trees_are_guessed_to_take_as_long_as_the_shortest(self):
        times = RoundTimes()
        assert times.seconds((1, 1)) == times.seconds((8, 16)) == 0.010
        times.learn((1, 1), 8, (), 8 * 0.5)
        assert times.seconds((1, 16)) == 0.5

    def test_follows_a_change_and_outlives_an_interruption(self):
        times = RoundTimes()
        times.learn((1, 16), 4, (), 4.0)
        times.learn((1, 16), 4, (), 4000.0)
        np.testing.assert_allclose(times.seconds((1, 16)), 1.2)
        for _ in range(40):
            times.learn((1, 16), 4, (), 12.0)
        np.testing.assert_allclose(times.seconds((1, 16)), 3.0, rtol=0.01)

    def test_prefill_and_rounds_are_learnt_from_dispatches_with_both(self):
        times, rounds = RoundTimes(), {(1, 1): 1.0, (1, 16): 1.5}
        for _ in range(60):
            for shape, seconds in rounds.items():
                times.learn(shape, 1, [(1, 128)], seconds + 4.0)
        prefill = times.prefill_seconds([(1, 128)])
        sums = [prefill + times.seconds(shape) for shape in rounds]
        np.testing.assert_allclose(sums, [5.0, 5.5], rtol=0.01)
        times.learn((0, 1), 0, [(1, 128)] * 2, 2 * prefill)
        assert times.prefill_seconds([(1, 128)] * 3) == pytest.approx(3 * prefill)

    def test_nothing_is_learnt_of_no_program(self):
        times = RoundTimes()
        times.learn((0, 1), 0, (), 1.0)
        assert times.seconds((1, 1)) == 0.010


@pytest.mark.parametrize("kind", budget_simulation.KINDS)
def test_close_to_the_best_bucket_and_never_far_from_plain(kind):
    """Of Qwen3-8B on an H200, with real acceptance; on average of all sessions."""
    alone, own = budget_simulation.fixed(kind), budget_simulation.auto(kind)
    assert min(alone.values()) / own >= 0.94
    assert alone[1] / own >= 0.94


class TestOwnBudgets:
    """Requests that want smaller trees than the engine has, or none."""

    def test_buckets_up_to_the_first_that_holds_the_largest_budget(self):
        shapes = [(live, bucket) for live in (1, 4) for bucket in (1, 4, 16, 64)]
        found = [shapes_for(shapes, [slot(budget=own)])[1] for own in (1, 2, 4, 5, 64, None)]
        assert found == [[1], [1, 4], [1, 4], [1, 4, 16], [1, 4, 16, 64], [1, 4, 16, 64]]
        assert shapes_for(shapes, [slot(budget=1), slot(budget=16)]) == (4, [1, 4, 16])

    def test_a_fixed_budget_is_plain_where_nobody_wants_trees(self):
        policy = FixedBudget([(2, 1), (2, 64)])
        assert bucket_of(policy, [slot(budget=1)] * 2) == 1
        assert bucket_of(policy, [slot(budget=1), slot(budget=2)]) == 64
        assert bucket_of(FixedBudget([(1, 64)]), [slot(budget=1)]) == 64

    def test_auto_chooses_no_larger_trees_than_wanted(self):
        policy = auto_of(1.0, 1.0, 1.0, 1.0)
        teach(policy, (2.0, 3.0, 4.0))
        assert bucket_of(policy, LIVE) == 64
        for budget, bucket in ((1, 1), (16, 16), (17, 32)):
            assert bucket_of(policy, [slot(budget=budget)]) == bucket
