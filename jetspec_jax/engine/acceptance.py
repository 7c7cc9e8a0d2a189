"""What rounds of each bucket commit, as far as rounds have shown it; K buckets, S rounds of a slot."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

# Horizons of running means, in rounds of a slot: the head's expectation changes with the text; how far it is
# off belongs to the pair and to the sampling. Plain rounds show neither, and the text may change in them.
_RECENT, _LONG, _FADING = 16, 512, 128
# The first guess: drafted tokens accepted for each doubling of the nodes, more than with most pairs, so that
# what is not known is tried; it counts as so many rounds.
_PER_DOUBLING, _PRIOR_ROUNDS = 0.5, 2


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
