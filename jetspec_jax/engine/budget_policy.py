"""The nodes of a dispatch's trees, and its rounds: decided on the host, between dispatches.

A round commits some tokens and takes some seconds; the bucket with the most tokens per second is the best.
Seconds are measured beforehand (`jetspec_jax.engine.round_costs`) and corrected by timed dispatches. Tokens
are estimated from the rounds that ran: each tells what every smaller tree would have had accepted, nothing
about larger ones, and a plain round nothing at all. So now and then a dispatch probes a larger bucket than
looks best. The choice changes no token and compiles nothing.

Rounds are as many as fit a slice of time where requests come and go, or as many as suit a call that nobody
joins: that is a setting of a policy.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jetspec_jax.engine.acceptance import AcceptanceEstimate
from jetspec_jax.engine.pace import Pace, Slices, mean_context
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.round_costs import RoundCosts

#: Rounds of a dispatch: the most, as many as usual, and where a slot may end among others.
MAX_ROUNDS, USUAL_ROUNDS, ROUNDS_TO_AN_END = 256, 64, 16
#: Rounds of a probe, and of the first dispatch of trees.
PROBE_ROUNDS = 8
# Rounds after which "auto" looks again.
_LOOK_ROUNDS = 32


class LiveSlot(NamedTuple):
    """A request that decodes: what a policy may know of it.

    Attributes:
        committed: Tokens in its stores.
        left: Tokens that it may still get.
        sampled: Whether its temperature is above 0.
        watched: Whether the caller may end it at any token.
        fresh: Whether it has had no round yet.
        budget: Most nodes of its trees; None is as many as there may be.
    """

    committed: int
    left: int
    sampled: bool
    watched: bool
    fresh: bool = False
    budget: int | None = None


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
        """The next dispatch, for those that decode, while so many others wait for a slot or are prefilled."""
        ...

    def observe(self, record: DispatchRecord) -> None:
        """Takes in what a dispatch did."""
        ...


def rounds_for(live: Sequence[LiveSlot], waiting: int, max_rounds: int = MAX_ROUNDS) -> int:
    """Rounds of a dispatch that suit the requests of a call."""
    # A slot that somebody waits for may end among others, and a watched one at any token.
    if (waiting and len(live) > 1) or any(slot.watched for slot in live):
        return min(ROUNDS_TO_AN_END, max_rounds)
    # What one dispatch can finish is not cut in two.
    left = _most_left(live)
    return left if left <= max_rounds else min(USUAL_ROUNDS, max_rounds)


def of_use(buckets: Sequence[int], live: Sequence[LiveSlot]) -> Sequence[int]:
    """The buckets, in rising order, up to the first that holds the largest budget of those that decode."""
    most = max((slot.budget or buckets[-1] for slot in live), default=buckets[-1])
    smaller = [bucket for bucket in buckets if bucket < most]
    return buckets[: len(smaller) + 1]


def _most_left(live: Sequence[LiveSlot]) -> int:
    return max([1, *(slot.left for slot in live)])


def sliced_rounds(slices: Slices, pace: Pace, bucket: int, live: Sequence[LiveSlot], waiting: int) -> int:
    """Rounds of a dispatch that fit a slice; one where somebody has had none, whose first token is due."""
    if any(slot.fresh for slot in live):
        return 1
    pair = pace.live_for(len(live)), bucket
    context = mean_context([slot.committed for slot in live])
    return min(slices.rounds(pace, pair, context, hurried=waiting > 0), _most_left(live), MAX_ROUNDS)


class FixedBudget:
    """One bucket, or plain decoding where nobody wants more."""

    def __init__(
        self,
        bucket: int,
        costs: RoundCosts | None = None,
        slices: Slices | None = None,
        *,
        plain: bool = False,
    ):
        """Takes its settings.

        Args:
            bucket: Nodes of a tree, root included.
            costs: What its rounds take; only slices need it.
            slices: How long dispatches are; None suits calls.
            plain: Whether it may decode plainly.
        """
        self._buckets, self._slices = (1, bucket) if plain else (bucket,), slices
        self._pace = None if costs is None else Pace(costs)
        self._context = 0.0

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """As many rounds as suit the requests."""
        self._context = mean_context([slot.committed for slot in live])
        bucket = of_use(self._buckets, live)[-1]
        if self._slices is None or self._pace is None:
            return Dispatch(bucket, rounds_for(live, waiting))
        return Dispatch(bucket, sliced_rounds(self._slices, self._pace, bucket, live, waiting))

    def observe(self, record: DispatchRecord) -> None:
        """Learns how long its rounds take."""
        rounds = int((record.tree_sizes > 0).any(axis=1).sum())
        if rounds and record.seconds is not None and self._pace is not None:
            self._pace.learn((len(record.live), record.bucket), self._context, rounds, record.seconds)


class AutoBudget:
    """The bucket that is expected to commit the most tokens per second."""

    def __init__(
        self, buckets: Sequence[int], costs: RoundCosts, probing: float, slices: Slices | None = None
    ):
        """Begins with a guess.

        Args:
            buckets: Those to choose from, in rising order; the first is 1.
            costs: What their rounds take; has no rounds of shapes that are not to be chosen.
            probing: Share of the time that probes may lose.
            slices: How long dispatches are; None suits calls.
        """
        self._buckets, self._pace, self._probing = tuple(buckets), Pace(costs), probing
        self._slices = slices
        # Greedy and sampled requests have other shares of their drafts accepted.
        self._acceptances = {sampled: AcceptanceEstimate(buckets[1:]) for sampled in (False, True)}
        self._acceptance = self._acceptances[False]
        # Seconds that probes may lose: now, at most (enough for one), and more with each round of the choice.
        self._context = self._account = self._most = self._earned = 0.0

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """The bucket that looks best, or a larger one when probing can afford it."""
        self._acceptance = self._acceptances[any(slot.sampled for slot in live)]
        self._context = mean_context([slot.committed for slot in live])
        slots, left = self._pace.live_for(len(live)), _most_left(live)
        # Rounds of many slots may have small trees alone.
        buckets = of_use(self._buckets[: len(self._pace.costs.buckets(slots))], live)
        rounds = [self._rounds(bucket, live, waiting) for bucket in buckets]
        tokens = [min(count, left) for count in self._acceptance.tokens()[: len(buckets)]]
        seconds = [
            self._pace.seconds((slots, bucket), self._context, turns)
            for bucket, turns in zip(buckets, rounds, strict=True)
        ]
        rates = [count / each for count, each in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        probe = max(range(best + 1, len(rates)), key=rates.__getitem__, default=best)
        turns = self._few(rounds[probe], (slots, buckets[probe]), PROBE_ROUNDS)
        each = self._pace.seconds((slots, buckets[probe]), self._context, turns)
        loss = turns * max(each - tokens[probe] / rates[best], 0.0)
        self._most, self._earned = loss, -loss / turns
        if probe > best and self._account >= loss:
            return Dispatch(buckets[probe], turns)
        turns = rounds[best]
        if best > 0:
            # At first a few, then as many as the estimate rests on.
            most = max(PROBE_ROUNDS, int(self._acceptance.rounds[best - 1]))
            turns = self._few(turns, (slots, buckets[best]), most)
        self._earned = self._probing * seconds[best]
        return Dispatch(buckets[best], turns)

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
            self._pace.learn((len(record.live), record.bucket), self._context, rounds, record.seconds)

    def _rounds(self, bucket: int, live: Sequence[LiveSlot], waiting: int) -> int:
        if self._slices is not None:
            return sliced_rounds(self._slices, self._pace, bucket, live, waiting)
        return min(rounds_for(live, waiting), _LOOK_ROUNDS)

    def _few(self, rounds: int, pair: tuple[int, int], most: int) -> int:
        """At most so many rounds, but no fewer than a slice has to have."""
        if self._slices is not None:
            most = max(most, self._slices.least(self._pace, pair, self._context))
        return min(rounds, most)


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
