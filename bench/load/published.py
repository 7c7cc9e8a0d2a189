"""Draws from published acceptance, because a head with random weights has no accepted drafts.

The figures are from the JetSpec paper and its repository's README: Qwen3-8B, greedy, one H100, block size 16.
`CHAIN` is their DFlash. `SGLANG` is SGLang's published speed of a DFlash chain on one B200.
"""

import functools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

#: Mean tokens per round by nodes of the tree, root included.
TAU = {
    "gsm8k": {16: 6.00, 64: 6.56, 128: 8.05, 256: 8.62},
    "math500": {16: 7.75, 64: 7.42, 128: 9.95, 256: 10.76},
    "humaneval": {16: 5.32, 64: 6.06, 128: 7.28, 256: 7.78},
    "mt-bench": {16: 3.98, 64: 4.77, 128: 5.52, 256: 5.94},
}
#: Mean tokens per round of a chain of 16 nodes.
CHAIN = {"gsm8k": 6.01, "math500": 7.83, "humaneval": 5.18, "mt-bench": 4.03}
#: Tokens per second of a chain on one B200, by prompt set and concurrency.
SGLANG = {"gsm8k": {1: 1162.0, 32: 15327.0}, "math500": {1: 1175.0}}
#: The draft depth of a head with this block size.
DEPTH = 15


class Acceptance:
    """The distribution of accepted drafts per round, for trees of each bucket.

    The accepted drafts of a tree of full depth have a truncated geometric distribution with the published
    mean. Buckets below 16 are treated as chains with the continuation probability of 16 nodes. Buckets
    between two published ones are interpolated linearly in the logarithm of the nodes. Means never fall with
    the bucket. One draw serves all buckets of a round: a smaller tree accepts what a larger tree accepts, up
    to its depth.
    """

    def __init__(self, task: str, buckets: Sequence[int], *, chains: bool = False):
        """Computes the distributions.

        Args:
            task: The prompt set.
            buckets: Buckets in ascending order, without 1.
            chains: Whether the trees are chains.
        """
        self.buckets = tuple(buckets)
        published = {16: CHAIN[task]} if chains else TAU[task]
        means = [tau_of(published, bucket) - 1 for bucket in buckets]
        self.means = np.maximum.accumulate(means)
        depths = [min(bucket - 1, DEPTH) for bucket in buckets]
        self._tails = [
            continuation(mean, depth) ** np.arange(1, depth + 1)
            for mean, depth in zip(self.means, depths, strict=True)
        ]

    def draw(self, rounds: int, rng: np.random.Generator) -> Int[np.ndarray, "S K"]:
        """Accepted drafts of ``rounds`` rounds with each bucket."""
        draws = rng.random(rounds)[:, None]
        return np.stack([(draws < tail).sum(axis=1) for tail in self._tails], axis=1)


def tau_of(published: dict[int, float], bucket: int) -> float:
    """Mean tokens per round with trees of a bucket; see `Acceptance`."""
    known = sorted(published)
    if bucket <= known[0]:
        probability = continuation(published[known[0]] - 1, min(known[0] - 1, DEPTH))
        return 1 + float((probability ** np.arange(1, min(bucket - 1, DEPTH) + 1)).sum())
    return float(np.interp(np.log2(bucket), np.log2(known), [published[nodes] for nodes in known]))


@functools.cache
def continuation(mean: float, depth: int) -> float:
    """The acceptance probability of each further draft that gives a mean of accepted drafts.

    Raises:
        ValueError: The mean is not between 0 and the depth.
    """
    if not 0 < mean < depth:
        raise ValueError(f"a mean of {mean:g} accepted drafts must lie between 0 and the depth, {depth}")
    low, high, powers = 0.0, 1.0, np.arange(1, depth + 1)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if float((middle**powers).sum()) < mean else (low, middle)
    return (low + high) / 2


def expected(acceptance: Acceptance, rounds: int) -> Float[np.ndarray, "S K"]:
    """The acceptance that a calibrated head expects in every round: the mean."""
    return np.broadcast_to(acceptance.means, (rounds, len(acceptance.means)))
