"""Chooses each dispatch's program and number of rounds, on the host, before the dispatch.

A round commits some tokens and takes some seconds; the bucket with the most tokens per second is the best.
Both are learnt from past dispatches alone. A tree shows what every smaller tree would have had accepted,
nothing about larger trees, and a plain round shows nothing. So some dispatches probe a larger bucket than
looks best. The choice changes no token.
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from jetspec_jax.engine.batch import BatchResult, Shape
from jetspec_jax.engine.size import FORWARD_ROWS

#: The shape that runs for a wanted one: the same, or another one while the wanted one is not compiled.
ShapeOf = Callable[[int, int], Shape]

#: Most rounds of a dispatch.
MAX_ROUNDS = 256
#: Seconds of a dispatch: at most, and while a request waits for a slot, for prefill or for its first token.
SLICE_SECONDS, HURRIED_SECONDS = 0.100, 0.015
#: Rounds of a probe, and of the first dispatch of trees.
PROBE_ROUNDS = 8
# The share of the smallest tree's time that a plain round is guessed to take, before one was timed.
_PLAIN_SHARE = 0.7
# Seconds of a round before any was timed.
_FIRST_GUESS = 0.010
# The weight of a timed dispatch in the running means, and the largest ratio that counts: an interruption must
# not.
_WEIGHT, _OUTLIER = 0.2, 2.0
# Horizons of the acceptance's running means, in rounds of a slot. The head's expectation changes with the
# text; its error depends on the pair and the sampling. Plain rounds measure neither, and the text may change
# meanwhile.
_RECENT, _LONG, _FADING = 16, 512, 128
# The first guess: drafted tokens accepted per doubling of the nodes. It is higher than for most pairs, so
# that untried buckets are tried; it counts as this many rounds.
_PER_DOUBLING, _PRIOR_ROUNDS = 0.5, 2


class LiveSlot(NamedTuple):
    """A policy's view of a decoding request."""

    remaining: int  # tokens that it may still get
    sampled: bool  # whether its temperature is above 0
    fresh: bool = False  # whether it has had no round yet
    budget: int | None = None  # most nodes of its trees; None is no limit


class RoundTimes:
    """Seconds of rounds and of prefill forwards by shape: running means of real dispatches.

    A round that was never timed is guessed by its rows (live slots times nodes): interpolated between timed
    rounds, and optimistic beyond them, so that it is tried. With fewer rows it takes less in proportion to
    the rows and `FORWARD_ROWS`; with more rows it takes no more. Plain rounds are apart: they draft nothing.
    """

    def __init__(self) -> None:
        self._rounds: dict[Shape, float] = {}
        self._forwards: dict[Shape, float] = {}

    def seconds(self, shape: Shape) -> float:
        """Seconds of a round of a shape."""
        if (known := self._rounds.get(shape)) is not None:
            return known
        timed = [(live * nodes, s, nodes == 1) for (live, nodes), s in self._rounds.items()]
        if not timed:
            return _FIRST_GUESS
        plain = shape[1] == 1
        alike = sorted((rows, s) for rows, s, is_plain in timed if is_plain == plain)
        if not alike:
            rows, least = min((rows, s) for rows, s, _ in timed)
            alike = [(rows, _PLAIN_SHARE * least if plain else least)]
        rows, seconds = zip((-FORWARD_ROWS, 0.0), *alike, strict=True)
        # Noise may give a falling line, but more rows never take less.
        return float(np.interp(shape[0] * shape[1], rows, np.maximum.accumulate(seconds)))

    def prefill_seconds(self, forwards: Sequence[Shape]) -> float:
        """Seconds of prefill forwards, as far as they were timed."""
        return sum(self._forwards.get(forward, 0.0) for forward in forwards)

    def learn(self, shape: Shape, rounds: int, forwards: Sequence[Shape], seconds: float) -> None:
        """Adds a dispatch of ``rounds`` rounds after some prefill forwards.

        What the means do not explain is shared: among parts that were never timed in proportion to their rows
        and `FORWARD_ROWS`, else among all parts in proportion to their seconds.
        """
        parts = [(self._forwards, forward, 1) for forward in forwards]
        parts += [(self._rounds, shape, rounds)] if rounds else []
        known = sum(count * means[part] for means, part, count in parts if part in means)
        new = [(means, part, count) for means, part, count in parts if part not in means]
        if new:
            # At least a tenth, if the known parts seem to have taken it all.
            rest = max(seconds - known, 0.1 * seconds) / sum(count * _rows(part) for _, part, count in new)
            for means, part, _ in new:
                means[part] = rest * _rows(part)
            return
        ratio = min(seconds / known, _OUTLIER) if known else 1.0
        for means, part in {(id(means), part): (means, part) for means, part, _ in parts}.values():
            means[part] *= 1 + _WEIGHT * (ratio - 1)


class AcceptanceEstimate:
    """Running estimate of the tokens that a round of each of K buckets commits."""

    def __init__(self, buckets: Sequence[int]):
        """Starts with a guess for ``buckets``: those of drafted trees, in rising order."""
        guess = _PER_DOUBLING * np.log2(np.asarray(buckets, float))
        # Drafted tokens: expected recently, expected in the long run, accepted in the long run.
        self._means = np.stack([guess] * 3)
        # Rounds of a slot that each bucket's means are based on.
        self.rounds = np.full(len(buckets), float(_PRIOR_ROUNDS))

    def tokens(self) -> list[float]:
        """Tokens per round: of a plain round, then of each bucket; more nodes never give fewer tokens."""
        recent, expected, accepted = self._means
        return np.maximum.accumulate([1.0, *(1.0 + recent * accepted / expected)]).tolist()

    def fade(self, rounds: int) -> None:
        """Moves the recent expectation towards the long run's, after ``rounds`` plain rounds of a slot."""
        self._means[0] += -math.expm1(-rounds / _FADING) * (self._means[1] - self._means[0])

    def learn(self, expected: Float[np.ndarray, "S k"], accepted: Float[np.ndarray, "S k"]) -> None:
        """Adds S >= 1 rounds of a slot: drafted tokens for their bucket and for all smaller buckets."""
        rounds, k = expected.shape
        values = np.stack([expected.mean(0), expected.mean(0), accepted.mean(0)])
        decays = -np.expm1(-rounds / np.array([[_RECENT], [_LONG], [_LONG]]))
        # A plain mean at first, then an exponential one.
        weights = np.maximum(decays, rounds / (self.rounds[:k] + rounds))
        before = self._means[:, k - 1 : k].copy()
        # Means are divided by each other, so none may be 0.
        self._means[:, :k] += weights * (np.maximum(values, 1e-6) - self._means[:, :k])
        # Larger buckets, which these rounds did not measure, scale with the largest measured bucket.
        self._means[:, k:] *= self._means[:, k - 1 : k] / before
        self.rounds[:k] += rounds


class BudgetPolicy(ABC):
    """Chooses before every dispatch, and learns from the results of past dispatches."""

    def __init__(self, shapes: Sequence[Shape], *, overlapped: bool = False):
        """A policy for these shapes of rounds, with plain ones for each number of live slots.

        If they are ``overlapped``, a dispatch is one round, and is chosen before the one before is observed.
        """
        self._shapes, self._overlapped, self._times = tuple(shapes), overlapped, RoundTimes()

    @abstractmethod
    def choose(
        self, live: Sequence[LiveSlot], waiting: int, forwards: Sequence[Shape], shape_of: ShapeOf
    ) -> tuple[Shape, int]:
        """The shape of the rounds, and how many, for the live slots, after some prefill forwards.

        Other requests are ``waiting`` for a slot or are prefilled. ``shape_of`` gives the shape that runs for
        a wanted one.
        """

    def observe(self, result: BatchResult) -> None:
        """Learns from a dispatch."""
        if result.seconds is not None:
            self._times.learn(result.batch.shape, result.rounds, result.batch.forwards, result.seconds)

    def _rounds(self, shape: Shape, live: Sequence[LiveSlot], waiting: int) -> int:
        """Rounds that fit a slice of time."""
        hurried = waiting > 0 or any(slot.fresh for slot in live)
        rounds = int((HURRIED_SECONDS if hurried else SLICE_SECONDS) / self._times.seconds(shape))
        return 1 if self._overlapped else max(min(rounds, _most_remaining(live), MAX_ROUNDS), 1)


class FixedBudget(BudgetPolicy):
    """Always the largest bucket, or a smaller one that holds the budgets of all live requests."""

    def choose(
        self, live: Sequence[LiveSlot], waiting: int, forwards: Sequence[Shape], shape_of: ShapeOf
    ) -> tuple[Shape, int]:
        """The smallest sufficient bucket, with rounds that fit a slice."""
        slots, buckets = shapes_for(self._shapes, live)
        shape = shape_of(slots, buckets[-1])
        return shape, self._rounds(shape, live, waiting)


class _Choice(NamedTuple):
    """The basis on which a dispatch was chosen."""

    acceptance: AcceptanceEstimate
    rounds: int
    earned: float  # seconds that each of its rounds adds to the account for probes; negative for a probe
    most: float  # most seconds in the account after it


class AutoBudget(BudgetPolicy):
    """Chooses the bucket that is expected to commit the most tokens per second."""

    def __init__(self, shapes: Sequence[Shape], probing: float, *, overlapped: bool = False):
        """A policy that starts with guesses; probes may lose the share ``probing`` of the time."""
        super().__init__(shapes, overlapped=overlapped)
        self._probing = probing
        # Greedy and sampled requests have different acceptance rates.
        trees = sorted({nodes for _, nodes in shapes})[1:]
        self._acceptances = {sampled: AcceptanceEstimate(trees) for sampled in (False, True)}
        # Seconds that probes may lose; at most enough for one probe.
        self._account = 0.0
        # The last observed dispatch, and those that were chosen after it.
        self._choice = _Choice(self._acceptances[False], 0, 0.0, 0.0)
        self._choices: deque[_Choice] = deque(maxlen=2 if overlapped else 1)

    def choose(
        self, live: Sequence[LiveSlot], waiting: int, forwards: Sequence[Shape], shape_of: ShapeOf
    ) -> tuple[Shape, int]:
        """The bucket that looks best, or a larger bucket if the account can pay for a probe."""
        acceptance = self._acceptances[any(slot.sampled for slot in live)]
        slots, buckets = shapes_for(self._shapes, live)
        remaining = _most_remaining(live)
        tokens = [min(count, remaining) for count in acceptance.tokens()[: len(buckets)]]
        rounds = [self._rounds((slots, bucket), live, waiting) for bucket in buckets]
        # The rounds share the time of the prefill before them.
        prefill = self._times.prefill_seconds(forwards)
        seconds = [
            self._times.seconds((slots, bucket)) + prefill / turns
            for bucket, turns in zip(buckets, rounds, strict=True)
        ]
        rates = [count / each for count, each in zip(tokens, seconds, strict=True)]
        places = range(len(buckets))
        best = max(places, key=rates.__getitem__)
        probe = max(places[best + 1 :], key=rates.__getitem__, default=best)
        turns = min(rounds[probe], PROBE_ROUNDS)
        loss = turns * max(seconds[probe] - tokens[probe] / rates[best], 0.0)
        # Probes that are not observed yet will cost what they were expected to.
        account = self._account + sum(min(each.earned * each.rounds, 0.0) for each in self._choices)
        chosen, earned = probe, -loss / turns
        if probe == best or account < loss:
            chosen, earned = best, self._probing * seconds[best]
            turns = rounds[best]
            if best > 0:
                # Few rounds at first, then as many as the estimate is based on.
                turns = min(turns, max(PROBE_ROUNDS, int(acceptance.rounds[best - 1])))
        self._choices.append(_Choice(acceptance, turns, earned, loss))
        return shape_of(slots, buckets[chosen]), turns

    def observe(self, result: BatchResult) -> None:
        """Learns from rounds of requests like those of the oldest choice that was not observed."""
        super().observe(result)
        if not result.batch.live:
            return
        if self._choices:
            self._choice = self._choices.popleft()
        choice, self._choice = self._choice, self._choice._replace(earned=0.0)
        ran = result.tree_sizes > 0
        if not result.rounds:
            return
        # Only rounds that ran count: a dispatch may end early, or the caller may cut it short.
        self._account = min(self._account + choice.earned * result.rounds, choice.most)
        if result.expected is None or result.accepted is None:
            choice.acceptance.fade(int(ran.sum()))
        else:
            choice.acceptance.learn(result.expected[ran], result.accepted[ran])


def shapes_for(shapes: Sequence[Shape], live: Sequence[LiveSlot]) -> tuple[int, list[int]]:
    """The fewest slots that hold all live ones, and their buckets up to the largest budget, in rising order.

    With many live slots only small trees have programs.
    """
    every = sorted({slots for slots, _ in shapes})
    slots = next((slots for slots in every if slots >= len(live)), every[-1])
    buckets = sorted(nodes for count, nodes in shapes if count == slots)
    most = max((slot.budget or buckets[-1] for slot in live), default=buckets[-1])
    smaller = [bucket for bucket in buckets if bucket < most]
    return slots, buckets[: len(smaller) + 1]


def _rows(shape: Shape) -> int:
    return FORWARD_ROWS + shape[0] * shape[1]


def _most_remaining(live: Sequence[LiveSlot]) -> int:
    return max([1, *(slot.remaining for slot in live)])
