"""Chooses each dispatch's bucket and number of rounds, on the host, before the dispatch.

A round commits some tokens and takes some seconds; the bucket with the most tokens per second is the best.
Seconds are measured beforehand (`jetspec_jax.engine.round_costs`) and corrected by timed dispatches. Tokens
are estimated from past rounds: a round shows what every smaller tree would have had accepted, nothing about
larger trees, and a plain round shows nothing. So some dispatches probe a larger bucket than looks best. The
choice changes no token and compiles nothing.

If requests come and go, a dispatch is a slice of time (`jetspec_jax.engine.pace`). Else the number of rounds
suits a single call. An engine with overlapped rounds always launches one.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from jetspec_jax.engine.acceptance import AcceptanceEstimate
from jetspec_jax.engine.pace import Pace
from jetspec_jax.engine.records import DispatchRecord
from jetspec_jax.engine.round_costs import Pair, RoundCosts

#: Rounds of a dispatch: at most, by default, and where a slot may end while requests wait.
MAX_ROUNDS, USUAL_ROUNDS, ROUNDS_TO_AN_END = 256, 64, 16
#: Rounds of a probe, and of the first dispatch of trees.
PROBE_ROUNDS = 8
# Rounds after which "auto" chooses again.
_LOOK_ROUNDS = 32


class LiveSlot(NamedTuple):
    """A policy's view of a decoding request.

    Attributes:
        committed: Tokens in the stores.
        sampled: Whether its temperature is above 0.
        watched: Whether the caller may end it at any token, because it has stop strings.
        fresh: Whether it has had no round yet.
        budget: Most nodes of its trees; None is no limit.
    """

    committed: int
    remaining: int
    sampled: bool
    watched: bool
    fresh: bool = False
    budget: int | None = None


class Dispatch(NamedTuple):
    """The policy's choice: nodes of a tree, root included (1 is plain decoding), and most rounds."""

    bucket: int
    rounds: int


@runtime_checkable
class BudgetPolicy(Protocol):
    """Chooses before every dispatch, and may learn from the records of past dispatches."""

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """Chooses for the live slots, while ``waiting`` other requests wait for a slot or are prefilled."""
        ...

    def observe(self, record: DispatchRecord) -> None:
        """Learns from a dispatch."""
        ...

    def use(self, costs: RoundCosts) -> None:
        """Uses other round times from now on: those of the start are guessed for most shapes."""
        ...


def rounds_for(live: Sequence[LiveSlot], waiting: int) -> int:
    """Rounds of a dispatch of a single call."""
    # A slot may end while another request waits for it, and a watched slot may end at any token.
    if (waiting and len(live) > 1) or any(slot.watched for slot in live):
        return ROUNDS_TO_AN_END
    # Requests that one dispatch can finish get one dispatch.
    remaining = _most_remaining(live)
    return remaining if remaining <= MAX_ROUNDS else USUAL_ROUNDS


def of_use(buckets: Sequence[int], live: Sequence[LiveSlot]) -> Sequence[int]:
    """The buckets, in rising order, up to the first that holds the largest budget of the live slots."""
    most = max((slot.budget or buckets[-1] for slot in live), default=buckets[-1])
    smaller = [bucket for bucket in buckets if bucket < most]
    return buckets[: len(smaller) + 1]


def _most_remaining(live: Sequence[LiveSlot]) -> int:
    return max([1, *(slot.remaining for slot in live)])


def _mean_context(live: Sequence[LiveSlot]) -> float:
    return sum(slot.committed for slot in live) / max(len(live), 1)


def sliced_rounds(pace: Pace, bucket: int, live: Sequence[LiveSlot], waiting: int) -> int:
    """Rounds that fit a slice of time; 1 if a request waits for its first token."""
    if any(slot.fresh for slot in live):
        return 1
    pair = pace.live_for(len(live)), bucket
    rounds = pace.slice_rounds(pair, _mean_context(live), hurried=waiting > 0)
    return min(rounds, _most_remaining(live), MAX_ROUNDS)


class FixedBudget:
    """Always one bucket, or plain decoding if no request has a larger budget."""

    def __init__(self, bucket: int, costs: RoundCosts | None = None, *, plain: bool = False):
        """A policy for one bucket, or with ``plain`` for it and plain rounds.

        With round costs dispatches are slices of time; without, their rounds suit single calls.
        """
        self._buckets = (1, bucket) if plain else (bucket,)
        self._pace = None if costs is None else Pace(costs)
        self._context = 0.0

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """The smallest sufficient bucket, with rounds that suit the requests."""
        self._context = _mean_context(live)
        bucket = of_use(self._buckets, live)[-1]
        if self._pace is None:
            return Dispatch(bucket, rounds_for(live, waiting))
        return Dispatch(bucket, sliced_rounds(self._pace, bucket, live, waiting))

    def observe(self, record: DispatchRecord) -> None:
        """Corrects the round times."""
        rounds = int((record.tree_sizes > 0).any(axis=1).sum())
        if rounds and record.seconds is not None and self._pace is not None:
            self._pace.learn((len(record.live), record.bucket), self._context, rounds, record.seconds)

    def use(self, costs: RoundCosts) -> None:
        """Replaces the round times."""
        self._pace = Pace(costs)


class _Choice(NamedTuple):
    """The basis on which a dispatch was chosen.

    Attributes:
        context: Mean context of the requests.
        earned: Seconds that each of its rounds adds to the account for probes; negative for a probe.
        most: Most seconds in the account after it.
    """

    acceptance: AcceptanceEstimate
    context: float
    rounds: int
    earned: float
    most: float


class AutoBudget:
    """Chooses the bucket that is expected to commit the most tokens per second."""

    def __init__(
        self,
        buckets: Sequence[int],
        costs: RoundCosts,
        probing: float,
        shape: Callable[[int, int], Pair] = lambda live, bucket: (live, bucket),
        *,
        sliced: bool = False,
        overlapped: bool = False,
    ):
        """A policy that starts with guessed acceptance rates.

        Args:
            buckets: The buckets to choose from, in rising order; the first is 1.
            costs: Round costs; a shape without a cost is never chosen.
            probing: Share of the time that probes may lose.
            shape: The shape that rounds of a number of live slots and a bucket would run in.
            sliced: Whether dispatches are slices of time; else their rounds suit single calls.
            overlapped: Whether dispatches have one round, and each is chosen before the one before is
                observed.
        """
        self._buckets, self._pace, self._probing = tuple(buckets), Pace(costs), probing
        self._shape, self._sliced, self._overlapped = shape, sliced, overlapped
        # Greedy and sampled requests have different acceptance rates.
        self._acceptances = {sampled: AcceptanceEstimate(buckets[1:]) for sampled in (False, True)}
        # Seconds that probes may lose; at most enough for one probe.
        self._account = 0.0
        # The last observed dispatch, and those that were chosen after it.
        self._choice = _Choice(self._acceptances[False], 0.0, 0, 0.0, 0.0)
        self._choices: deque[_Choice] = deque(maxlen=2 if overlapped else 1)

    def choose(self, live: Sequence[LiveSlot], waiting: int) -> Dispatch:
        """The bucket that looks best, or a larger bucket if the account can pay for a probe."""
        acceptance = self._acceptances[any(slot.sampled for slot in live)]
        context = _mean_context(live)
        slots, remaining = self._pace.live_for(len(live)), _most_remaining(live)
        # With many live slots only small trees have programs.
        buckets = of_use(self._buckets[: len(self._pace.costs.buckets(slots))], live)
        rounds = [self._rounds(bucket, live, waiting) for bucket in buckets]
        tokens = [min(count, remaining) for count in acceptance.tokens()[: len(buckets)]]
        shapes = [self._shape(slots, bucket) for bucket in buckets]
        seconds = [
            self._pace.seconds(pair, context, turns) for pair, turns in zip(shapes, rounds, strict=True)
        ]
        rates = [count / each for count, each in zip(tokens, seconds, strict=True)]
        # Trees of another size would run in place of those that are not compiled yet.
        there = [place for place, (_, bucket) in enumerate(shapes) if bucket == buckets[place]] or [0]
        best = max(there, key=rates.__getitem__)
        probe = max((place for place in there if place > best), key=rates.__getitem__, default=best)
        turns = self._at_most(rounds[probe], shapes[probe], context, PROBE_ROUNDS)
        each = self._pace.seconds(shapes[probe], context, turns)
        loss = turns * max(each - tokens[probe] / rates[best], 0.0)
        # Probes that are not observed yet will cost what they were expected to.
        account = self._account + sum(min(each.earned * each.rounds, 0.0) for each in self._choices)
        chosen, earned = probe, -loss / turns
        if probe == best or account < loss:
            chosen, turns, earned = best, rounds[best], self._probing * seconds[best]
            if best > 0:
                # Few rounds at first, then as many as the estimate is based on.
                most = max(PROBE_ROUNDS, int(acceptance.rounds[best - 1]))
                turns = self._at_most(turns, shapes[best], context, most)
        self._choices.append(_Choice(acceptance, context, turns, earned, loss))
        return Dispatch(buckets[chosen], turns)

    def observe(self, record: DispatchRecord) -> None:
        """Learns from rounds of requests like those of the oldest choice that was not observed."""
        if self._choices:
            self._choice = self._choices.popleft()
        choice, self._choice = self._choice, self._choice._replace(earned=0.0)
        ran = record.tree_sizes > 0
        if not (rounds := int(ran.any(axis=1).sum())):
            return
        # Only rounds that ran count: a dispatch may end early, or the caller may cut it short.
        self._account = min(self._account + choice.earned * rounds, choice.most)
        if record.expected is None or record.accepted is None:
            choice.acceptance.fade(int(ran.sum()))
        else:
            choice.acceptance.learn(record.expected[ran], record.accepted[ran])
        if record.seconds is not None:
            self._pace.learn((len(record.live), record.bucket), choice.context, rounds, record.seconds)

    def use(self, costs: RoundCosts) -> None:
        """Replaces the round times."""
        self._pace = Pace(costs)

    def _rounds(self, bucket: int, live: Sequence[LiveSlot], waiting: int) -> int:
        if self._overlapped:
            return 1
        if self._sliced:
            return sliced_rounds(self._pace, bucket, live, waiting)
        return min(rounds_for(live, waiting), _LOOK_ROUNDS)

    def _at_most(self, rounds: int, pair: tuple[int, int], context: float, most: int) -> int:
        """Limits rounds to ``most``, but not below the shortest slice."""
        if self._sliced:
            most = max(most, self._pace.least_rounds(pair, context))
        return min(rounds, most)
