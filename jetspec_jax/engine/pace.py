"""How long rounds take by now, and how many of them fit a slice of time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jetspec_jax.engine.round_costs import Pair, RoundCosts

# The horizon in rounds, and the largest error, as a logarithm: an interruption says nothing.
_PACE, _OUTLIER = 256, 0.25
# The part of an error that is taken for one of all shapes: where it was timed, and where it was guessed.
_SHARED, _SHARED_GUESS = 0.9, 0.3


class Pace:
    """Seconds of rounds: what they cost alone, times a running ratio of all shapes and one of each."""

    def __init__(self, costs: RoundCosts):
        """Begins with what the costs say."""
        self.costs = costs
        # Logarithms of the ratios.
        self._common, self._each = 0.0, dict.fromkeys(costs.seconds, 0.0)
        self._lives = tuple(sorted({live for live, _ in costs.seconds}))

    def live_for(self, count: int) -> int:
        """Live slots of the programs that run so many."""
        return next((live for live in self._lives if live >= count), self._lives[-1])

    def seconds(self, pair: Pair, context: float, rounds: float) -> float:
        """Seconds of a round of a shape, in a dispatch of so many rounds."""
        return math.exp(self._common + self._each[pair]) * self.costs.at(pair, context, rounds)

    def learn(self, pair: Pair, context: float, rounds: int, seconds: float) -> None:
        """Takes in how long a dispatch of so many rounds took."""
        error = math.log(seconds / (rounds * self.seconds(pair, context, rounds)))
        step = -math.expm1(-rounds / _PACE) * min(error, _OUTLIER)
        shared = _SHARED_GUESS if pair in self.costs.guessed else _SHARED
        # A busy machine or a large batch slows all shapes down.
        self._common += shared * step
        self._each[pair] += (1 - shared) * step


@dataclass(frozen=True)
class Slices:
    """How long a dispatch takes, so that the host looks often enough at who comes and who goes.

    Attributes:
        seconds: Of a dispatch.
        hurried: Of one while somebody waits for a slot or for the prompt's forward.
        own_share: Part of a dispatch's time that it may take beside its rounds; where rounds are so short
            that more of it would be lost, a dispatch takes longer instead.
        most: Seconds that it takes for that, at most: where the machine is busy, what a dispatch takes beside
            its rounds is easily overrated.
    """

    seconds: float = 0.040
    hurried: float = 0.015
    own_share: float = 0.03
    most: float = 0.200

    def rounds(self, pace: Pace, pair: Pair, context: float, *, hurried: bool) -> int:
        """Rounds of a dispatch of a shape after so many tokens."""
        alone = pace.seconds(pair, context, math.inf)
        return max(int((self.hurried if hurried else self.seconds) / alone), self.least(pace, pair, context))

    def least(self, pace: Pace, pair: Pair, context: float) -> int:
        """Rounds of the shortest dispatch that loses no more than its share, if it is not too long."""
        alone = pace.seconds(pair, context, math.inf)
        beside = pace.seconds(pair, context, 1) - alone
        wanted = math.ceil(beside * (1 - self.own_share) / self.own_share / alone)
        return max(min(wanted, int(self.most / alone)), 1)


def mean_context(lengths: Sequence[int]) -> float:
    """Tokens before a round, on average of its slots."""
    return sum(lengths) / max(len(lengths), 1)
