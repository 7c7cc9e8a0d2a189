"""Current round times, and the number of rounds that fit a slice of time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jetspec_jax.engine.round_costs import Pair, RoundCosts

# Horizon in rounds, and the largest error, as a logarithm: an interruption must not count.
_PACE, _OUTLIER = 256, 0.25
# The share of an error that corrects all shapes: of a timed shape, and of an interpolated one.
_SHARED, _SHARED_GUESS = 0.9, 0.3


class Pace:
    """Round times: measured costs, times a running ratio of all shapes and of each shape."""

    def __init__(self, costs: RoundCosts):
        """Starts with the measured costs."""
        self.costs = costs
        # Logarithms of the ratios.
        self._common, self._each = 0.0, dict.fromkeys(costs.seconds, 0.0)
        self._lives = tuple(sorted({live for live, _ in costs.seconds}))

    def live_for(self, count: int) -> int:
        """Live slots of the program that runs ``count`` slots; the largest number with costs if none does."""
        return next((live for live in self._lives if live >= count), self._lives[-1])

    def seconds(self, pair: Pair, context: float, rounds: float) -> float:
        """Seconds of a round of a shape, in a dispatch of ``rounds`` rounds."""
        return math.exp(self._common + self._each[pair]) * self.costs.at(pair, context, rounds)

    def learn(self, pair: Pair, context: float, rounds: int, seconds: float) -> None:
        """Corrects the ratios by the seconds of a dispatch of ``rounds`` rounds, if its shape has costs."""
        if pair not in self._each:
            return
        error = math.log(seconds / (rounds * self.seconds(pair, context, rounds)))
        step = -math.expm1(-rounds / _PACE) * min(error, _OUTLIER)
        shared = _SHARED_GUESS if pair in self.costs.guessed else _SHARED
        # A busy machine or a large batch slows down all shapes.
        self._common += shared * step
        self._each[pair] += (1 - shared) * step


@dataclass(frozen=True)
class Slices:
    """Length of a dispatch: short enough that the host often admits and ends requests.

    Attributes:
        seconds: Seconds of a dispatch.
        hurried: Seconds of a dispatch while a request waits for a slot or for prefill.
        overhead_share: Largest share of a dispatch's time beside its rounds. If rounds are so short that the
            share would be larger, the dispatch takes longer instead.
        most: Longest such dispatch, in seconds: on a busy machine the overhead is easily overestimated.
    """

    seconds: float = 0.040
    hurried: float = 0.015
    overhead_share: float = 0.03
    most: float = 0.200

    def rounds(self, pace: Pace, pair: Pair, context: float, *, hurried: bool) -> int:
        """Rounds of a dispatch of a shape at a context."""
        alone = pace.seconds(pair, context, math.inf)
        return max(int((self.hurried if hurried else self.seconds) / alone), self.least(pace, pair, context))

    def least(self, pace: Pace, pair: Pair, context: float) -> int:
        """Rounds of the shortest dispatch that keeps the overhead's share, within ``most`` seconds."""
        alone = pace.seconds(pair, context, math.inf)
        beside = pace.seconds(pair, context, 1) - alone
        wanted = math.ceil(beside * (1 - self.overhead_share) / self.overhead_share / alone)
        return max(min(wanted, int(self.most / alone)), 1)


def mean_context(lengths: Sequence[int]) -> float:
    """Mean number of committed tokens of the slots."""
    return sum(lengths) / max(len(lengths), 1)
