"""Current round times, and the number of rounds that fit a slice of time."""

import math

from jetspec_jax.engine.round_costs import Pair, RoundCosts

#: Seconds of a slice: short enough that the host often admits and ends requests; and while a request waits.
SLICE_SECONDS, HURRIED_SECONDS = 0.040, 0.015
#: Largest share of a slice's time beside its rounds. If rounds are so short that the share would be larger,
#: the slice takes longer instead, but not longer than these seconds: on a busy machine the overhead is easily
#: overestimated.
OVERHEAD_SHARE, MOST_SLICE_SECONDS = 0.03, 0.200
# Horizon in rounds, and the largest error, as a logarithm: an interruption must not count.
_PACE, _OUTLIER = 256, 0.25
# The share of an error that corrects all shapes: of a timed shape, and of an interpolated one.
_SHARED, _SHARED_GUESS = 0.9, 0.3


class Pace:
    """Round times: measured costs, times a running ratio of all shapes and of each shape."""

    def __init__(self, costs: RoundCosts):
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

    def slice_rounds(self, pair: Pair, context: float, *, hurried: bool) -> int:
        """Rounds of a slice of time; ``hurried`` while a request waits for a slot or for prefill."""
        alone = self.seconds(pair, context, math.inf)
        seconds = HURRIED_SECONDS if hurried else SLICE_SECONDS
        return max(int(seconds / alone), self.least_rounds(pair, context))

    def least_rounds(self, pair: Pair, context: float) -> int:
        """Rounds of the shortest slice that keeps `OVERHEAD_SHARE`, within `MOST_SLICE_SECONDS`."""
        alone = self.seconds(pair, context, math.inf)
        beside = self.seconds(pair, context, 1) - alone
        wanted = math.ceil(beside * (1 - OVERHEAD_SHARE) / OVERHEAD_SHARE / alone)
        return max(min(wanted, int(MOST_SLICE_SECONDS / alone)), 1)
