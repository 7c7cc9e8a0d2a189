"""How many nodes pay: the choice of the bucket for every dispatch, for the tree algorithm "auto".

A round commits some tokens and takes some seconds; the bucket with the most tokens per second is the best.
Seconds are measured (`jetspec_jax.round_costs`). Tokens are estimated from the rounds that ran: each tells
what every smaller tree would have had accepted, but nothing about larger ones, and a plain round nothing at
all. So now and then a few rounds run with a larger bucket than looks best, as often as a small share of the
time can pay for them. The choice falls between dispatches, on the host, among programs that are there:
nothing compiles, and the tokens are the target's own whatever is chosen.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from jetspec_jax.round_costs import RoundCosts

#: Rounds of a dispatch that is to find something out.
PROBE_ROUNDS = 8
# Horizons of running means, in rounds of a slot. What the head expects follows the text; how far it is wrong
# is a property of the pair and of the request's settings, and takes many rounds to tell.
_RECENT, _LONG = 32, 512
# What is known at first counts as so many rounds.
_PRIOR = 8
# Drafted tokens that a bucket has accepted at first: this much for each doubling of its nodes. A little more
# than most pairs, so that what is not known is tried.
_PER_DOUBLING = 0.5


class Choice(NamedTuple):
    """What the next dispatch does.

    Attributes:
        bucket: Its index; 0 is plain.
        rounds: How many, at most.
    """

    bucket: int
    rounds: int


class Acceptance:
    """Running estimate of the tokens that a round of each bucket commits."""

    def __init__(self, buckets: Sequence[int]):
        """Begins with a guess.

        Args:
            buckets: Of drafted trees, in rising order.
        """
        guess = _PER_DOUBLING * np.log2(np.asarray(buckets, np.float64))
        # Drafted tokens accepted: as the head expects lately, as it did for long, and as it was for long.
        self._means = np.stack([guess] * 3)
        self._keeps = np.log([[1 - 1 / _RECENT], [1 - 1 / _LONG], [1 - 1 / _LONG]])
        self._seen = np.full(len(guess), float(_PRIOR))

    def tokens(self) -> Float[np.ndarray, "K1"]:
        """Tokens of a round: of a plain one, then of each bucket; never less with more nodes."""
        recent, expected, accepted = self._means
        return np.maximum.accumulate(np.append(1.0, 1.0 + recent * accepted / expected))

    def known(self, bucket: int) -> bool:
        """Whether rounds tell more about a bucket, of which 0 is plain, than the guess."""
        return bucket == 0 or bool(self._seen[bucket - 1] > _PRIOR)

    def trusted(self, bucket: int, rounds: int) -> int:
        """For how many rounds, of so many, the estimate may be trusted: of trees, as many as it has seen."""
        return rounds if bucket == 0 else min(rounds, int(self._seen[bucket - 1]))

    def learn(self, expected: Float[np.ndarray, "R K"], accepted: Int[np.ndarray, "R K"]) -> None:
        """Takes R rounds in, with what they tell about their own bucket, the last, and all smaller ones."""
        rounds, known = expected.shape
        if rounds == 0:
            return
        means, expects = self._means, expected.mean(axis=0)
        values = np.maximum([expects, expects, accepted.mean(axis=0)], 1e-6)
        before, seen = means[:, known - 1].copy(), self._seen[:known]
        # The plain mean at first, then one that forgets.
        weight = np.maximum(1 - np.exp(rounds * self._keeps), rounds / (seen + rounds))
        means[:, :known] += weight * (values - means[:, :known])
        # Larger trees than these rounds had rise and fall with the largest that they had.
        means[:, known:] *= (means[:, known - 1] / before)[:, None]
        seen += rounds


class AutoBudget:
    """Chooses buckets, and keeps account of the time that goes into finding out."""

    def __init__(self, acceptance: Acceptance, costs: RoundCosts, probing: float):
        """Starts an account.

        Args:
            acceptance: What rounds are expected to commit; it may know something already.
            costs: What they take, plain rounds first.
            probing: Share of the time for rounds that do not look best.
        """
        self.acceptance, self.costs, self.probing = acceptance, costs, probing
        self._account = 0.0

    def choose(self, context: float, rounds: int) -> Choice:
        """The bucket of the next dispatch.

        Args:
            context: Committed tokens of a slot, on average.
            rounds: Most rounds of the dispatch.
        """
        tokens, seconds = self.acceptance.tokens(), self.costs.at(context, rounds)
        rates = tokens / seconds
        best = int(np.argmax(rates))
        few = min(rounds, PROBE_ROUNDS)
        if best + 1 < len(rates):
            # The most promising of those that nothing is learnt about meanwhile.
            probe = best + 1 + int(np.argmax(rates[best + 1 :]))
            loss = few * (seconds[probe] - tokens[probe] / rates[best])
            loss += self.costs.dispatches[probe] * (1 - few / rounds)  # one dispatch more
            # Before anything is known of trees, a probe need not be paid for.
            if self._account >= loss or not self.acceptance.known(1):
                self._account = max(self._account - loss, 0.0)
                return Choice(probe, few)
        rounds = self.acceptance.trusted(best, rounds)
        if not self.acceptance.known(best):
            return Choice(best, rounds)
        self._account += self.probing * rounds * float(seconds[best])
        # Enough for one probe of the dearest; what is not needed now is not saved up for worse times.
        self._account = min(self._account, few * float(seconds.max()) + max(self.costs.dispatches))
        return Choice(best, rounds)

    def learn(
        self, bucket: int, expected: Float[np.ndarray, "R K"], accepted: Int[np.ndarray, "R K"]
    ) -> None:
        """Takes in what a dispatch's rounds tell; plain ones tell nothing."""
        if bucket:
            self.acceptance.learn(expected, accepted)
