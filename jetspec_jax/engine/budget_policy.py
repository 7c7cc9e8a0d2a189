"""The nodes of a dispatch's trees, and its rounds: decided on the host, between dispatches.

A round commits some tokens and takes some seconds; the bucket with the most tokens per second is the best.
Seconds are measured beforehand (`jetspec_jax.engine.round_costs`) and corrected by timed dispatches. Tokens
are estimated from the rounds that ran: each tells what every smaller tree would have had accepted, nothing
about larger ones, and a plain round nothing at all. So now and then a dispatch probes a larger bucket than
looks best. The choice changes no token and compiles nothing.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.round_costs import RoundCosts

#: Rounds of a dispatch: the most, as many as usual, and where a slot may end among others.
MAX_ROUNDS, USUAL_ROUNDS, ROUNDS_TO_AN_END = 256, 64, 16
#: Rounds of a probe, and of the first dispatch of trees.
PROBE_ROUNDS = 8
# Rounds after which "auto" looks again.
_LOOK_ROUNDS = 32
# Horizons of running means, in rounds of a slot: the head's expectation changes with the text; how far it is
# off belongs to the pair and to the sampling. Plain rounds show neither, and the text may change in them.
_RECENT, _LONG, _FADING = 16, 512, 128
# The first guess: drafted tokens accepted for each doubling of the nodes, more than with most pairs, so that
# what is not known is tried; it counts as so many rounds.
_PER_DOUBLING, _PRIOR_ROUNDS = 0.5, 2
# Of the pace: the horizon in rounds, the part of an error that is taken for one of all buckets, and the
# largest error, as a logarithm: an interruption says nothing.
_PACE, _SHARED, _OUTLIER = 256, 0.9, 0.25


class LiveSlot(NamedTuple):
    """A request that decodes: what a policy may know of it.

    Attributes:
        committed: Tokens in its stores.
        left: Tokens that it may still get.
        sampled: Whether its temperature is above 0.
        watched: Whether the caller may end it at any token.
    """

    committed: int
    left: int
    sampled: bool
    watched: bool


class Dispatch(NamedTuple):
    """What the next dispatch does.

    Attributes:
        bucket: Nodes of a tree, root included; 1 is plain decoding.
        rounds: How many rounds, at most.
    """

    bucket: int
    rounds: int


@runtime_checkable
class BudgetPolicy(Protocol):
    """Decides before every dispatch, and may learn from what dispatches did."""

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """The next dispatch, for the requests that decode, while so many others wait for a slot."""
        ...

    def observe(self, record: DispatchRecord) -> None:
        """Takes in what a dispatch did."""
        ...


def rounds_for(live: Sequence[LiveSlot], waiting: int, max_rounds: int = MAX_ROUNDS) -> int:
    """Rounds of a dispatch that suit the requests."""
    # A slot that somebody waits for may end among others, and a watched one at any token.
    if (waiting and len(live) > 1) or any(slot.watched for slot in live):
        return min(ROUNDS_TO_AN_END, max_rounds)
    # What one dispatch can finish is not cut in two.
    left = _most_left(live)
    return left if left <= max_rounds else min(USUAL_ROUNDS, max_rounds)


def _most_left(live: Sequence[LiveSlot]) -> int:
    return max([1, *(slot.left for slot in live)])


class FixedBudget:
    """One bucket, always."""

    def __init__(self, bucket: int):
        """Takes the bucket: nodes of a tree, root included."""
        self._bucket = bucket

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """As many rounds as suit the requests."""
        return Dispatch(self._bucket, rounds_for(live, waiting))

    def observe(self, record: DispatchRecord) -> None:
        """Learns nothing."""


class AutoBudget:
    """The bucket that is expected to commit the most tokens per second."""

    def __init__(self, buckets: Sequence[int], costs: RoundCosts, probing: float):
        """Begins with a guess.

        Args:
            buckets: Those to choose from, in rising order; the first is 1.
            costs: What their rounds take.
            probing: Share of the time that probes may lose.
        """
        self._buckets, self._pace, self._probing = tuple(buckets), Pace(costs), probing
        # Greedy and sampled requests have other shares of their drafts accepted.
        self._acceptances = {sampled: AcceptanceEstimate(buckets[1:]) for sampled in (False, True)}
        self._acceptance = self._acceptances[False]
        # Seconds that probes may lose: now, at most (enough for one), and more with each round of the choice.
        self._context = self._account = self._most = self._earned = 0.0

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """The bucket that looks best, or a larger one when probing can afford it."""
        self._acceptance = self._acceptances[any(slot.sampled for slot in live)]
        self._context = sum(slot.committed for slot in live) / max(len(live), 1)
        rounds, left = min(rounds_for(live, waiting), _LOOK_ROUNDS), _most_left(live)
        tokens = [min(count, left) for count in self._acceptance.tokens()]
        seconds = [self._pace.seconds(bucket, self._context, rounds) for bucket in self._buckets]
        rates = [count / each for count, each in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        probe = max(range(best + 1, len(rates)), key=rates.__getitem__, default=best)
        turns = min(rounds, PROBE_ROUNDS)
        each = self._pace.seconds(self._buckets[probe], self._context, turns)
        loss = turns * max(each - tokens[probe] / rates[best], 0.0)
        self._most, self._earned = loss, -loss / turns
        if probe > best and self._account >= loss:
            return Dispatch(self._buckets[probe], turns)
        if best > 0:
            # At first a few, then as many as the estimate rests on.
            rounds = min(rounds, max(PROBE_ROUNDS, int(self._acceptance.rounds[best - 1])))
        self._earned = self._probing * seconds[best]
        return Dispatch(self._buckets[best], rounds)

    def observe(self, record: DispatchRecord) -> None:
        """Learns from rounds of requests like those of the last choice."""
        ran = record.tree_sizes > 0
        if not (rounds := int(ran.any(axis=1).sum())):
            return
        # Rounds that ended early, or that the caller cut short, count as they ran.
        self._account = min(self._account + self._earned * rounds, self._most)
        self._earned = 0.0
        if record.expected is None or record.accepted is None:
            self._acceptance.fade(int(ran.sum()))
        else:
            self._acceptance.learn(record.expected[ran], record.accepted[ran])
        if record.seconds is not None:
            self._pace.learn(record.bucket, self._context, rounds, record.seconds)


class LatePolicy:
    """A policy that learns of a dispatch when the next is decided: by then all processes know its seconds."""

    def __init__(self, policy: BudgetPolicy):
        """Takes the policy."""
        self._policy = policy
        self._record: DispatchRecord | None = None

    @property
    def seconds(self) -> float | None:
        """Of the last dispatch; what is set here is learned."""
        return None if self._record is None else self._record.seconds

    @seconds.setter
    def seconds(self, value: float | None) -> None:
        if self._record is not None:
            self._record = self._record._replace(seconds=value)

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """The policy's choice."""
        if self._record is not None:
            self._policy.observe(self._record)
            self._record = None
        return self._policy.choose(live, waiting)

    def observe(self, record: DispatchRecord) -> None:
        """Keeps the record."""
        self._record = record


class AcceptanceEstimate:
    """Running estimate of the tokens that a round of each of K buckets commits."""

    def __init__(self, buckets: Sequence[int]):
        """Begins with a guess; the buckets are those of drafted trees, in rising order."""
        guess = _PER_DOUBLING * np.log2(np.asarray(buckets, float))
        # Drafted tokens: expected in recent rounds, expected in the long run, accepted in the long run.
        self._means = np.stack([guess] * 3)
        # Rounds of a slot that each bucket's means rest on.
        self.rounds = np.full(len(buckets), float(_PRIOR_ROUNDS))

    def tokens(self) -> list[float]:
        """Tokens of a round: of a plain one, then of each bucket; never fewer with more nodes."""
        recent, expected, accepted = self._means
        return np.maximum.accumulate([1.0, *(1.0 + recent * accepted / expected)]).tolist()

    def fade(self, rounds: int) -> None:
        """After so many rounds of a slot without trees, its expectation nears that of the long run."""
        self._means[0] += -math.expm1(-rounds / _FADING) * (self._means[1] - self._means[0])

    def learn(self, expected: Float[np.ndarray, "S k"], accepted: Float[np.ndarray, "S k"]) -> None:
        """Takes in S >= 1 rounds of a slot: drafted tokens of their bucket and of all smaller ones."""
        rounds, k = expected.shape
        values = np.stack([expected.mean(0), expected.mean(0), accepted.mean(0)])
        forgets = -np.expm1(-rounds / np.array([[_RECENT], [_LONG], [_LONG]]))
        # The plain mean at first, then one that forgets.
        weights = np.maximum(forgets, rounds / (self.rounds[:k] + rounds))
        before = self._means[:, k - 1 : k].copy()
        # Means are divided by each other, so none is 0.
        self._means[:, :k] += weights * (np.maximum(values, 1e-6) - self._means[:, :k])
        # Larger trees than these rounds had rise and fall with the largest that they had.
        self._means[:, k:] *= self._means[:, k - 1 : k] / before
        self.rounds[:k] += rounds


class Pace:
    """Seconds of rounds: what they cost alone, times a running ratio of all buckets and one of each."""

    def __init__(self, costs: RoundCosts):
        """Begins with what the costs say."""
        self._costs = costs
        # Logarithms of the ratios.
        self._common, self._each = 0.0, dict.fromkeys(costs.seconds, 0.0)

    def seconds(self, bucket: int, context: float, rounds: float) -> float:
        """Seconds of a round of a bucket, in a dispatch of so many rounds."""
        return math.exp(self._common + self._each[bucket]) * self._costs.at(bucket, context, rounds)

    def learn(self, bucket: int, context: float, rounds: int, seconds: float) -> None:
        """Takes in how long a dispatch of so many rounds took."""
        error = math.log(seconds / (rounds * self.seconds(bucket, context, rounds)))
        step = -math.expm1(-rounds / _PACE) * min(error, _OUTLIER)
        # A busy machine or a large batch slows all buckets down.
        self._common += _SHARED * step
        self._each[bucket] += (1 - _SHARED) * step
