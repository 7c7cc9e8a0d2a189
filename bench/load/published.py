"""Acceptance that others have published, as draws: with random weights nothing that is drafted is accepted.

The figures are those of the JetSpec paper and of its repository's README: Qwen3-8B, greedy, one H100, block
size 16. `CHAIN` is DFlash there; `SGLANG` is what SGLang has published of a DFlash chain on one B200.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

#: Mean tokens of a round by nodes of the tree, root included.
TAU = {
    "gsm8k": {16: 6.00, 64: 6.56, 128: 8.05, 256: 8.62},
    "math500": {16: 7.75, 64: 7.42, 128: 9.95, 256: 10.76},
    "humaneval": {16: 5.32, 64: 6.06, 128: 7.28, 256: 7.78},
    "mt-bench": {16: 3.98, 64: 4.77, 128: 5.52, 256: 5.94},
}
#: The same of a chain of 16 nodes.
CHAIN = {"gsm8k": 6.01, "math500": 7.83, "humaneval": 5.18, "mt-bench": 4.03}
#: Tokens per second of a chain on one B200, by prompt set and concurrency.
SGLANG = {"gsm8k": {1: 1162.0, 32: 15327.0}, "math500": {1: 1175.0}}
#: Tokens that a head of this block size drafts, one below the other.
DEPTH = 15


class Acceptance:
    """Drafted tokens that are accepted of trees of each bucket in one round of a slot.

    Of a tree as deep as it can be, the accepted drafts have a truncated geometric distribution whose mean is
    the published one. Buckets up to 16 are taken for chains that go on with the probability that gives 16
    nodes their mean; those between two published ones lie on a line over the logarithm of the nodes. No
    bucket has fewer than a smaller one. One draw serves all buckets of a round: what a larger tree has
    accepted, the smaller one has up to its own end.
    """

    def __init__(self, task: str, buckets: Sequence[int], *, chains: bool = False):
        """Takes the prompt set, and buckets in rising order, none of them 1; they may be those of chains."""
        self.buckets = tuple(buckets)
        published = {16: CHAIN[task]} if chains else TAU[task]
        means = [tau_of(published, bucket) - 1 for bucket in buckets]
        self.means = np.maximum.accumulate(means)
        depths = [min(bucket - 1, DEPTH) for bucket in buckets]
        self._tails = [
            going_on(mean, depth) ** np.arange(1, depth + 1)
            for mean, depth in zip(self.means, depths, strict=True)
        ]

    def draw(self, rounds: int, rng: np.random.Generator) -> Int[np.ndarray, "S K"]:
        """Accepted drafts of so many rounds, of each bucket."""
        draws = rng.random(rounds)[:, None]
        return np.stack([(draws < tail).sum(axis=1) for tail in self._tails], axis=1)


def tau_of(published: dict[int, float], bucket: int) -> float:
    """Mean tokens of a round with a tree of a bucket; see `Acceptance`."""
    known = sorted(published)
    if bucket <= known[0]:
        own = going_on(published[known[0]] - 1, min(known[0] - 1, DEPTH))
        return 1 + float((own ** np.arange(1, min(bucket - 1, DEPTH) + 1)).sum())
    return float(np.interp(np.log2(bucket), np.log2(known), [published[each] for each in known]))


@functools.cache
def going_on(mean: float, depth: int) -> float:
    """The probability of each further draft with which so many of a depth are accepted on average.

    Raises:
        ValueError: No more than the depth can be accepted.
    """
    if not 0 < mean < depth:
        raise ValueError(f"of {depth} drafts {mean:g} cannot be accepted on average")
    low, high, powers = 0.0, 1.0, np.arange(1, depth + 1)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle**powers).sum()) < mean else (low, middle)
    return (low + high) / 2


def expected(acceptance: Acceptance, rounds: int) -> Float[np.ndarray, "S K"]:
    """What a calibrated head expects of the rounds: their mean."""
    return np.broadcast_to(acceptance.means, (rounds, len(acceptance.means)))
