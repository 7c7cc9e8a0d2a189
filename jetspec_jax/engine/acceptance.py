"""Estimates how many tokens a round of each bucket commits: K buckets, S rounds of a slot."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

# Horizons of the running means, in rounds of a slot. The head's expectation changes with the text; its error
# depends on the pair and the sampling. Plain rounds measure neither, and the text may change meanwhile.
_RECENT, _LONG, _FADING = 16, 512, 128
# The first guess: drafted tokens accepted per doubling of the nodes. It is higher than for most pairs, so
# that untried buckets are tried; it counts as this many rounds.
_PER_DOUBLING, _PRIOR_ROUNDS = 0.5, 2


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
