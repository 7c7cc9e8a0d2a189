"""How many nodes pay: the choice of the bucket for every dispatch, for the tree algorithm "auto".

A round commits some tokens and takes some seconds; the bucket with the most tokens per second is the best.
Seconds are measured beforehand (`jetspec_jax.engine.round_costs`) and corrected by what dispatches take.
Tokens are estimated from the rounds that ran: each tells what every smaller tree would have had accepted, but
nothing about larger ones, and a plain round nothing at all. So now and then a dispatch runs with a
larger bucket than looks best, as often as a small share of the time can pay for it. The choice falls between dispatches,
on the host, among programs that are there: nothing compiles, and the tokens are the target's own whatever is
chosen.

What runs before every dispatch is plain Python: for a handful of numbers NumPy takes several times as long.
What follows from what a dispatch tells is made when that is learnt, behind the launch of the next one.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jetspec_jax.decode.state import RoundRecord
from jetspec_jax.engine.round_costs import RoundCosts

#: Rounds of a dispatch that is to find something out, unless all that it could have cost no more.
PROBE_ROUNDS = 8
# Or so many times as much, where trees are best anyway: a few rounds tell what others have accepted, but how
# long they take, which differs by a few percent, only many.
_WHOLE = 3.0
# The dispatch that a probe costs takes so many times what was timed: the host hands tokens out, and finds its
# caches cold.
_ANOTHER = 1.5
# Horizons of running means, in rounds of a slot. What the head expects follows the text; how far it is wrong
# is a property of the pair and of the request's settings, and takes many rounds to tell.
_RECENT, _LONG = 32, 512
# What is known at first counts as so many rounds.
_PRIOR = 8
# Of the pace, in rounds: the horizon, as how many of a bucket the pace of all buckets counts, and how many of
# its own are enough. A dispatch behind a prefill has to wait before it can be timed, which takes 2 to 3 % of
# what a small model needs for 64 rounds: more than to know the pace better gains.
_PACE, _PACE_PRIOR, _PACE_KNOWN = 2048, 64, 128
# A dispatch that took longer than so many times what is expected of it counts as one that took as long.
_OUTLIER = 1.25
# Plain rounds tell their pace alone. While that is known, so many may pass before one is learnt from again:
# learning takes the host 0.1 ms a dispatch, which a small model feels.
_UNLEARNT = 512
# By how much a bucket of an unknown pace may be faster than it seems.
_HOPE = 0.1
# Drafted tokens that a bucket has accepted at first: this much for each doubling of its nodes. A little more
# than most pairs, so that what is not known is tried.
_PER_DOUBLING = 0.5
# Fewer drafted tokens than that count as that many: means are divided by each other.
_LEAST = 1e-6


class Choice(NamedTuple):
    """What the next dispatch does.

    Attributes:
        bucket: Its index; 0 is plain.
        rounds: How many, at most. Where it may have more, the next choice waits for what these tell.
        learns: Whether what they tell is to be learnt.
    """

    bucket: int
    rounds: int
    learns: bool = True


class AcceptanceEstimate:
    """Running estimate of the tokens that a round of each bucket commits."""

    def __init__(self, buckets: Sequence[int]):
        """Begins with a guess.

        Args:
            buckets: Of drafted trees, in rising order.
        """
        guess = [_PER_DOUBLING * math.log2(bucket) for bucket in buckets]
        # Drafted tokens accepted: as the head expects lately, as it did for long, and as it was for long.
        self._recent, self._expected, self._accepted = list(guess), list(guess), list(guess)
        self._seen = [float(_PRIOR)] * len(guess)
        self._tokens = self._of_all()

    def tokens(self) -> Sequence[float]:
        """Tokens of a round: of a plain one, then of each bucket; never less with more nodes."""
        return self._tokens

    def known(self, bucket: int) -> bool:
        """Whether rounds tell more about a bucket, of which 0 is plain, than the guess."""
        return bucket == 0 or self._seen[bucket - 1] > _PRIOR

    def trusted(self, bucket: int, rounds: int) -> int:
        """For how many rounds, of so many, the estimate may be trusted: of trees, as many as it has seen."""
        return rounds if bucket == 0 else min(rounds, int(self._seen[bucket - 1]))

    def begin(self, share: float) -> None:
        """New texts begin: until their own rounds tell more, the head is taken to expect what it did of most.

        While plain rounds are best nothing else would tell that a hard text is over.

        Args:
            share: Their share of all that decode now, 0 to 1.
        """
        if not share:
            return
        for k, mean in enumerate(self._expected):
            self._recent[k] += share * (mean - self._recent[k])
        self._tokens = self._of_all()

    def learn(self, rounds: int, expected: Sequence[float], accepted: Sequence[float]) -> None:
        """Takes rounds in, with what they tell about their own bucket, the last, and all smaller ones.

        Args:
            rounds: How many, at least 1.
            expected: Drafted tokens of a round that the head expected to be accepted, on average, by bucket.
            accepted: Likewise, those that were.
        """
        last = len(expected) - 1
        for means, values, horizon in (
            (self._recent, expected, _RECENT),
            (self._expected, expected, _LONG),
            (self._accepted, accepted, _LONG),
        ):
            before, forgets = means[last], -math.expm1(-rounds / horizon)
            for k, value in enumerate(values):
                # The plain mean at first, then one that forgets.
                weight = max(forgets, rounds / (self._seen[k] + rounds))
                means[k] += weight * (max(value, _LEAST) - means[k])
            # Larger trees than these rounds had rise and fall with the largest that they had.
            for k in range(last + 1, len(means)):
                means[k] *= means[last] / before
        for k in range(last + 1):
            self._seen[k] += rounds
        self._tokens = self._of_all()

    def _of_all(self) -> list[float]:
        tokens = [1.0]
        for recent, expected, accepted in zip(self._recent, self._expected, self._accepted, strict=True):
            tokens.append(max(tokens[-1], 1.0 + recent * accepted / expected))
        return tokens


class Pace:
    """How many times longer rounds take here than their costs say: sampling, other processes, other text.

    Buckets differ by a few percent, which what was timed beforehand does not tell for certain. The ratio of a
    bucket is that of its own dispatches, and that of all while it has had few.
    """

    def __init__(self, costs: RoundCosts):
        """Begins with what the costs say."""
        self._costs = costs
        # Of each bucket: rounds, weighted, and the sum of their ratios.
        self._rounds = [0.0] * len(costs.dispatches)
        self._sums = [0.0] * len(costs.dispatches)
        self._set_ratios()

    def seconds(self, bucket: int, context: float, rounds: float) -> float:
        """Seconds of a round of a bucket, in a dispatch of so many rounds."""
        return self._ratios[bucket] * self._costs.at(bucket, context, rounds)

    def learn(self, bucket: int, context: float, rounds: int, seconds: float | None) -> None:
        """Takes in how long a dispatch took that ran so many rounds; None is one that was not timed."""
        if rounds == 0:
            return
        # Also what was learnt of the others gets old: a machine that was busy need not be.
        keep, most = math.exp(-rounds / _PACE), _OUTLIER * self._ratios[bucket]
        self._rounds = [keep * own for own in self._rounds]
        self._sums = [keep * own for own in self._sums]
        if seconds is not None:
            ratio = seconds / (rounds * self._costs.at(bucket, context, rounds))
            self._rounds[bucket] += rounds
            self._sums[bucket] += rounds * min(ratio, most)
        self._set_ratios()

    def known(self, bucket: int) -> bool:
        """Whether enough rounds of a bucket were timed lately."""
        return self._rounds[bucket] > _PACE_KNOWN

    def doubts(self) -> Sequence[float]:
        """1 for a bucket that no dispatch ran with lately, 0 for one whose pace is known for certain."""
        return self._doubts

    def _set_ratios(self) -> None:
        rounds = sum(self._rounds)
        together = sum(self._sums) / rounds if rounds else 1.0
        self._doubts = [_PACE_PRIOR / (_PACE_PRIOR + own) for own in self._rounds]
        self._ratios = [
            (_PACE_PRIOR * together + ratios) / (_PACE_PRIOR + own)
            for own, ratios in zip(self._rounds, self._sums, strict=True)
        ]


class AutoBudget:
    """Chooses buckets, and keeps account of the time that goes into finding out."""

    def __init__(self, acceptance: AcceptanceEstimate, costs: RoundCosts, probing: float):
        """Starts an account.

        Args:
            acceptance: What rounds are expected to commit; it may know something already.
            costs: What they take, plain rounds first.
            probing: Share of the time for rounds that do not look best.
        """
        self.acceptance, self.costs, self.probing = acceptance, costs, probing
        self.pace = Pace(costs)
        self._account = 0.0
        # Plain rounds since one was learnt from.
        self._unlearnt = 0

    def choose(self, context: float, rounds: int, left: int, feeds: int) -> Choice:
        """The bucket of the next dispatch.

        Args:
            context: Committed tokens of a slot, on average.
            rounds: Most rounds of the dispatch.
            left: Most tokens that a slot may still get.
            feeds: Launches that show the proposer what it has not seen, before it can draft.
        """
        tokens = self.acceptance.tokens()
        # Larger trees come to the end of a request in fewer rounds, which then share the dispatch.
        lasts = [min(rounds, max(left / own, 1.0)) for own in tokens]
        tokens = [min(own, left) for own in tokens]
        seconds = [self.pace.seconds(bucket, context, own) for bucket, own in enumerate(lasts)]
        rates = [own / each for own, each in zip(tokens, seconds, strict=True)]
        best = rates.index(max(rates))
        # Where trees are best, the proposer is to see its tokens anyway.
        first = 0.0 if best else feeds * self.costs.feed
        # Enough for one probe of the dearest; what is not needed now is not saved up for worse times.
        most = first + PROBE_ROUNDS * max(seconds) + _ANOTHER * max(self.costs.dispatches)
        probe = self._most_promising(best, rates)
        if probe is not None:
            each = seconds[probe] - tokens[probe] / rates[best]
            another = _ANOTHER * self.costs.dispatches[probe]
            part = min(PROBE_ROUNDS / lasts[probe], 1.0)
            loss, turns = first + part * lasts[probe] * each + (1 - part) * another, min(rounds, PROBE_ROUNDS)
            # A whole dispatch tells more, and there is none more.
            whole = first + lasts[probe] * each
            if self.acceptance.known(probe) and whole <= min((_WHOLE if best else 1.0) * loss, most):
                loss, turns = whole, rounds
            # Before anything is known of trees, a probe need not be paid for.
            if self._account >= loss or not self.acceptance.known(1):
                self._account = max(self._account - loss, 0.0)
                return Choice(probe, turns)
        rounds = self.acceptance.trusted(best, rounds)
        if self.acceptance.known(best):
            earned = self.probing * min(rounds, lasts[best]) * seconds[best]
            self._account = min(self._account + earned, most)
        learns = best > 0 or self._unlearnt >= _UNLEARNT or not self.pace.known(0)
        if not learns:
            self._unlearnt += min(rounds, left)
        return Choice(best, rounds, learns)

    def wants_time(self, bucket: int) -> bool:
        """Whether a dispatch of a bucket is to be timed even if it has to wait for that."""
        return not self.pace.known(bucket)

    def observe(self, bucket: int, context: float, records: RoundRecord, seconds: float | None) -> None:
        """Takes in what a dispatch tells.

        Args:
            bucket: Its index.
            context: Committed tokens of a slot before it, on average.
            records: Of its rounds, on the host; with more than the tokens, if it drafted.
            seconds: How long its rounds took; None if they were not timed.
        """
        if self._unlearnt:
            self.pace.learn(0, context, self._unlearnt, None)
            self._unlearnt = 0
        # Of each slot, how many rounds it decoded in; they are the first.
        ran = (records.tree_sizes > 0).sum(axis=0).tolist()
        rounds = sum(ran)
        if bucket and rounds:
            # Where a slot did not decode there is nothing to add.
            expected, accepted = ((x.sum(axis=(0, 1)) / rounds).tolist() for x in records.reach)
            self.acceptance.learn(rounds, expected, accepted)
        self.pace.learn(bucket, context, max(ran), seconds)

    def _most_promising(self, best: int, rates: Sequence[float]) -> int | None:
        """The bucket to find out about: a larger one than the best, or one whose pace nobody knows."""
        hopes = {
            bucket: rate * (1 + _HOPE * doubt)
            for bucket, (rate, doubt) in enumerate(zip(rates, self.pace.doubts(), strict=True))
            if bucket > best or (bucket < best and doubt > 0.5)
        }
        if not self.acceptance.known(1):
            hopes.pop(0, None)  # first of all, what trees accept
        return max(hopes, key=hopes.__getitem__, default=None)
