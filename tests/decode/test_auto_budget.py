"""The choice of buckets: what it costs against the best fixed one, in simulated worlds."""

import numpy as np
import pytest

from jetspec_jax.decode.state import RoundRecord
from jetspec_jax.engine.auto_budget import PROBE_ROUNDS, AcceptanceEstimate, AutoBudget, Choice, Pace
from jetspec_jax.engine.round_costs import RoundCosts
from jetspec_jax.tree.auto import Auto

pytestmark = pytest.mark.usefixtures("quick_compiles")

BUCKETS = (16, 32, 64, 128, 256)
TOKENS, DISPATCH, ROUNDS, PROBING = 20_000, 0.3, 16, Auto().probing

# Milliseconds of a round, plain first.
LARGE_MODEL = (4.5, 5.9, 6.0, 6.1, 6.9, 9.4)
SMALL_MODEL = (0.20, 0.42, 0.43, 0.46, 0.52, 0.66)
ON_A_CPU = (2.6, 12.0, 15.3, 23.0, 45.0, 90.0)
# Drafted tokens that a round of each bucket accepts.
GOOD = (2.5, 3.5, 4.5, 5.5, 6.4)
FAIR = (1.1, 1.15, 1.2, 1.25, 1.3)
POOR = (0.2, 0.25, 0.3, 0.32, 0.34)
DEEP = (0.3, 1.0, 2.0, 3.5, 5.5)


def costs_of(seconds, dispatch=DISPATCH, feed=0.0):
    return RoundCosts((64, 768), tuple((one, one) for one in seconds), (dispatch,) * len(seconds), feed)


class World:
    """Rounds whose drafts are accepted as often as is said on average, in moods that change."""

    def __init__(self, drafted, seed, bias=1.3):
        self.drafted, self.rng, self.bias = np.asarray(drafted, float), np.random.default_rng(seed), bias

    def rounds(self, bucket, count):
        spread = 0.4
        mood = np.exp(self.rng.normal(-(spread**2) / 2, spread, (count, 1)))
        more = np.diff(self.drafted[:bucket], prepend=0.0)
        accepted = np.cumsum(self.rng.poisson(more * mood), axis=1)
        return self.bias * mood * self.drafted[:bucket], accepted


def simulate(auto, world, seconds, tokens=TOKENS, slower=1.0, dispatch=DISPATCH, untold=None):
    """Time of a token, and how many rounds ran with each bucket; the machine may be slower for now.

    As in an engine, what a dispatch tells is learnt while the next runs, or before it if that was asked for;
    ``untold`` is what the last one of the text before told, and becomes that of this one.
    """
    time, done, ran, untold = 0.0, 0, np.zeros(len(seconds), int), [] if untold is None else untold
    while done < tokens:
        bucket, rounds, learns = auto.choose(300, ROUNDS, TOKENS, 0)
        if untold:
            learn(auto, *untold.pop())
            if done == 0:
                auto.acceptance.begin(1.0)
        took = slower * (rounds * seconds[bucket] + dispatch)
        time += took
        ran[bucket] += rounds
        expected, accepted = world.rounds(bucket, rounds)
        done += rounds + (accepted[:, -1].sum() if bucket else 0)
        if learns:
            untold.append((bucket, rounds, took, expected, accepted))
        if rounds < ROUNDS:
            learn(auto, *untold.pop())
    return time / done, ran


def learn(auto, bucket, rounds, took, expected, accepted):
    own = np.ones((rounds, 1, 1 + 1), np.int32)
    budgets = bucket and expected.shape[1]
    if bucket:
        reach = np.concatenate([expected, accepted], axis=1, dtype=np.float32)
        own = np.concatenate([own, reach[:, None].view(np.int32)], axis=2)
    auto.observe(bucket, 300, RoundRecord(own, budgets=budgets), took)


def all_seconds(pace):
    """Of a round of each bucket."""
    return [pace.seconds(bucket, 300, ROUNDS) for bucket in range(len(pace.doubts()))]


def fixed(drafted, seconds, dispatch=DISPATCH):
    """Time of a token with each bucket."""
    return (np.asarray(seconds) + dispatch / ROUNDS) / (1 + np.asarray([0, *drafted]))


@pytest.mark.parametrize("seconds", [LARGE_MODEL, SMALL_MODEL, ON_A_CPU])
@pytest.mark.parametrize("drafted", [GOOD, FAIR, POOR, DEEP])
def test_close_to_the_best_bucket_and_never_far_from_plain(seconds, drafted):
    times = []
    for seed in range(6):
        auto = AutoBudget(AcceptanceEstimate(BUCKETS), costs_of(seconds), PROBING)
        times.append(simulate(auto, World(drafted, seed), seconds)[0])
    per_token = fixed(drafted, seconds)
    assert np.mean(times) <= 1.03 * per_token.min()
    assert max(times) <= 1.03 * per_token[0]


@pytest.mark.parametrize(("left", "best"), [(1000, 1), (128, 1), (64, 0), (3, 0)])
def test_a_request_may_end_before_its_rounds(left, best):
    """A plain dispatch may then be as short as one of trees, which else have more tokens to share it."""
    acceptance = AcceptanceEstimate((16, 32))
    for _ in range(300):
        acceptance.learn(64, [1.0, 1.5], [1, 1.5])
    auto = AutoBudget(acceptance, costs_of((1.0, 2.3, 3.0), dispatch=30.0), probing=0.0)
    assert auto.choose(300, 64, left, 0) == Choice(best, 64)


@pytest.mark.parametrize("drafted", [GOOD, FAIR, POOR])
def test_costs_that_were_timed_wrong(drafted):
    """Each bucket a few percent too fast or too slow, and all of them slower than they were."""
    timed = np.asarray(SMALL_MODEL) * [1.0, 0.94, 1.05, 0.95, 1.08, 0.93] / 1.3
    times = []
    for seed in range(4):
        auto = AutoBudget(AcceptanceEstimate(BUCKETS), costs_of(timed), PROBING)
        simulate(auto, World(drafted, 2 * seed), SMALL_MODEL, 2 * TOKENS)
        times.append(simulate(auto, World(drafted, 2 * seed + 1), SMALL_MODEL, 2 * TOKENS)[0])
    assert np.mean(times) <= 1.03 * fixed(drafted, SMALL_MODEL).min()


def test_the_pace_outlives_an_interruption():
    auto = AutoBudget(AcceptanceEstimate(BUCKETS), costs_of(SMALL_MODEL), PROBING)
    simulate(auto, World(GOOD, 0), SMALL_MODEL)
    before = all_seconds(auto.pace)
    auto.pace.learn(0, 300, ROUNDS, 1000.0)
    auto.pace.learn(0, 300, 0, 1.0)
    np.testing.assert_allclose(all_seconds(auto.pace), before, rtol=0.06)


@pytest.mark.parametrize("seed", range(3))
def test_a_busy_machine_is_forgotten(seed):
    """Buckets that were only tried while it was slow are not slow for ever; nor is the first that ran."""
    seconds, drafted = LARGE_MODEL, (0.1, 0.12, 0.14, 0.16, 0.16)  # plain is best, by 20 %
    auto = AutoBudget(AcceptanceEstimate(BUCKETS), costs_of(seconds), PROBING)
    world = World(drafted, seed)
    for slower, tokens in ((4.0, 60), (1.0, 300), (3.0, 2000), (1.0, 3000), (2.0, 500)):
        simulate(auto, world, seconds, tokens, slower)
    time, ran = simulate(auto, world, seconds, 50_000)
    assert time <= 1.03 * fixed(drafted, seconds)[0], ran


def test_follows_a_text_that_changes():
    """After a while: probes are few."""
    autos = [AutoBudget(AcceptanceEstimate(BUCKETS), costs_of(SMALL_MODEL), PROBING) for _ in range(6)]
    for drafted, mostly_trees in ((POOR, False), (GOOD, True), (POOR, False)):
        ran = sum(simulate(auto, World(drafted, i), SMALL_MODEL)[1] for i, auto in enumerate(autos))
        assert (ran[0] < 0.3 * ran.sum()) == mostly_trees, ran


@pytest.mark.parametrize(("seconds", "most"), [(LARGE_MODEL, 1.03), (SMALL_MODEL, 0.87)])
def test_a_hard_text_tells_little_about_the_next(seconds, most):
    """Each is easy or hard, by chance; where plain rounds suit the hard ones, no fixed bucket is as fast."""
    auto, rng = AutoBudget(AcceptanceEstimate(BUCKETS), costs_of(seconds), PROBING), np.random.default_rng(0)
    taken, alone, untold = 0.0, np.zeros(len(seconds)), []
    for text in range(100):
        drafted = (GOOD, POOR)[rng.integers(2)]
        auto.acceptance.begin(1.0)
        taken += 200 * simulate(auto, World(drafted, text), seconds, 200, untold=untold)[0]
        alone += 200 * fixed(drafted, seconds)
    assert taken <= most * alone.min()


def test_the_account_bounds_what_probing_loses():
    """Trees never pay here: after the first, a probe comes only when plain rounds have earned it."""
    seconds = (1.0, 9.0, 9.0, 9.0, 9.0, 9.0)
    auto = AutoBudget(AcceptanceEstimate(BUCKETS), costs_of(seconds), PROBING)
    time, ran = simulate(auto, World(POOR, 0), seconds)
    assert time <= 1.02 * fixed(POOR, seconds)[0]
    assert ran[1:].sum() > PROBE_ROUNDS, "it goes on asking"
    never = AutoBudget(AcceptanceEstimate(BUCKETS), costs_of(seconds), 0.0)
    assert simulate(never, World(POOR, 0), seconds)[1][1:].sum() == PROBE_ROUNDS


@pytest.mark.parametrize(
    ("best", "rounds", "beside"), [(0, PROBE_ROUNDS, 1.5 * 10.0 / 2 + 3 * 5.0), (1, ROUNDS, 0)]
)
def test_a_probe_pays_for_what_the_head_must_see_first(best, rounds, beside):
    """And, one and a half times, for one dispatch more; where trees are best, it sees its tokens anyway."""
    losses = rounds * (2.0 - 1.0) + beside
    seconds = (1.0, 2.0) if best == 0 else (9.0, 1.0, 2.0)
    acceptance = AcceptanceEstimate((16, 32)[: len(seconds) - 1])
    for _ in range(100):
        acceptance.learn(16, [1e-6] * (len(seconds) - 1), [0] * (len(seconds) - 1))
    auto = AutoBudget(acceptance, costs_of(seconds, dispatch=10.0, feed=5.0), probing=0.1)
    earned = 0.1 * (ROUNDS * 1.0 + 10.0)
    choices = [auto.choose(300, ROUNDS, TOKENS, 3) for _ in range(50)]
    dispatches = [choice.bucket == best for choice in choices].index(False)
    assert choices[dispatches].rounds == rounds
    assert (dispatches - 1) * earned < losses <= dispatches * earned


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [
        ((9.0, 1.0, 1.01), 64),
        ((9.0, 1.0, 2.0), PROBE_ROUNDS),
        ((1.0, 9.0, 2.02), PROBE_ROUNDS),  # plain rounds are the best
    ],
)
def test_a_probe_is_a_whole_dispatch_where_that_loses_little(seconds, rounds):
    """Beside a few rounds and one dispatch more: so of a tree that is 1 % slower, not of one half as fast."""
    acceptance = AcceptanceEstimate((16, 32))
    for _ in range(100):
        acceptance.learn(16, [1.0, 1.0], [1, 1])
    auto = AutoBudget(acceptance, costs_of(seconds), probing=1.0)
    choices = {auto.choose(300, 64, TOKENS, 0) for _ in range(20)}
    assert choices == {Choice(int(seconds[1] == 1.0), 64), Choice(2, rounds)}


def test_plain_rounds_are_learnt_from_now_and_then():
    """Once their pace is known: of 512 rounds one dispatch, and the others make what is known older."""
    acceptance = AcceptanceEstimate((16,))
    for _ in range(100):
        acceptance.learn(16, [1e-6], [0])
    auto = AutoBudget(acceptance, costs_of((1.0, 2.0)), probing=0.0)
    known = 0.0
    # Dispatches that are not learnt from, of 64 rounds, or 30 where a request may get no more tokens.
    for lefts in ([], [], [], [64] * 8, [64] * 7 + [30, 64]):
        for left in lefts:
            assert auto.choose(300, 64, left, 0) == Choice(0, 64, learns=False)
        assert auto.choose(300, 64, TOKENS, 0) == Choice(0, 64)
        learn(auto, 0, 64, 64 * 1.0 + DISPATCH, None, None)
        known = 64 + known * np.exp(-(64 + sum(lefts)) / 2048)
        assert auto.pace.doubts()[0] == pytest.approx(64 / (64 + known))


def test_a_short_dispatch_pays_more_of_it_each_round():
    costs = RoundCosts((100, 300), ((1.0, 2.0), (4.0, 4.0)), (8.0, 4.0), 0.5)
    np.testing.assert_allclose([costs.at(k, 200, 16) for k in (0, 1)], [1.5 + 0.5, 4.0 + 0.25])
    np.testing.assert_allclose([costs.at(k, 400, 2) for k in (0, 1)], [2.5 + 4.0, 4.0 + 2.0])
    assert costs.at(0, -10_000, 16) > 0


class TestAcceptance:
    def test_learns_the_mean_of_what_it_saw(self):
        acceptance = AcceptanceEstimate((16, 32))
        for _ in range(200):
            acceptance.learn(8, [1.0, 1.5], [1, 2])
            acceptance.learn(8, [1.0, 1.5], [3, 4])
        np.testing.assert_allclose(acceptance.tokens(), [1.0, 3.0, 4.0], rtol=0.02)

    def test_a_text_begins_as_most_were(self):
        acceptance = AcceptanceEstimate((16,))
        for _ in range(200):
            acceptance.learn(16, [4.0], [4])
        acceptance.learn(64, [1.0], [1])
        long, lately = 4.0 - 3.0 * -np.expm1(-64 / 512), 4.0 - 3.0 * -np.expm1(-64 / 32)
        np.testing.assert_allclose(acceptance.tokens(), [1.0, 1.0 + lately], rtol=1e-3)
        acceptance.begin(0.25)
        np.testing.assert_allclose(acceptance.tokens(), [1.0, 1.0 + 0.75 * lately + 0.25 * long], rtol=1e-3)
        acceptance.begin(1.0)
        np.testing.assert_allclose(acceptance.tokens(), [1.0, 1.0 + long], rtol=1e-3)

    def test_larger_trees_than_were_seen_move_along(self):
        acceptance = AcceptanceEstimate((16, 32))
        for _ in range(200):
            acceptance.learn(16, [0.5], [1])
        plain, small, large = acceptance.tokens()
        assert plain == 1
        assert small == pytest.approx(2.0, rel=0.02)
        # 32 nodes were guessed to have a quarter more accepted than 16.
        assert large == pytest.approx(2.25, rel=0.02)

    def test_nothing_accepted_at_all(self):
        acceptance = AcceptanceEstimate((16, 32))
        for _ in range(300):
            acceptance.learn(16, [0.0, 0.0], [0, 0])
        np.testing.assert_allclose(acceptance.tokens(), 1.0, atol=1e-3)

    def test_a_dispatch_in_which_nobody_decoded_changes_nothing(self):
        auto = AutoBudget(AcceptanceEstimate((16, 32)), costs_of((1.0, 2.0, 3.0)), PROBING)
        before = auto.acceptance.tokens(), all_seconds(auto.pace)
        nothing = RoundRecord(np.zeros((16, 2, 1 + 4 + 2 * 2), np.int32), budgets=2)
        auto.observe(2, 300, nothing, 1.0)
        assert (auto.acceptance.tokens(), all_seconds(auto.pace)) == before


def test_what_was_timed_gets_old():
    """Also while rounds run that nobody times; what it told stays."""
    costs = costs_of(SMALL_MODEL)
    pace = Pace(costs)
    pace.learn(1, 300, 600, 1.2 * 600 * costs.at(1, 300, 600))
    seconds = all_seconds(pace)
    assert (pace.known(0), pace.known(1)) == (False, True)
    pace.learn(0, 300, 4000, None)
    assert not pace.known(1)
    np.testing.assert_allclose(all_seconds(pace), seconds)
    np.testing.assert_allclose(seconds, [1.2 * costs.at(k, 300, ROUNDS) for k in range(6)])
