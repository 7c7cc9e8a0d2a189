"""What a round costs on this device, by bucket and context: measured once, with the programs that decode."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from jetspec_jax.progress import unseen

#: Timed pairs of dispatches of each bucket and context, whose median counts.
REPEATS = 7
#: A timed dispatch has fewer rounds than the engine's where those take longer than this.
DISPATCH_SECONDS = 0.05


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the rounds of each bucket.

    Attributes:
        contexts: Two numbers of committed tokens, in rising order.
        seconds: Of a round alone, at both contexts.
        dispatches: What a dispatch takes beside its rounds: the launch, and the wait for its records.
    """

    contexts: tuple[int, int]
    seconds: Mapping[int, tuple[float, float]]
    dispatches: Mapping[int, float]

    def at(self, bucket: int, context: float, rounds: float) -> float:
        """Seconds of a round after so many tokens, with its share of a dispatch of so many rounds."""
        (low, high), (first, last) = self.contexts, self.seconds[bucket]
        alone = first + (context - low) / (high - low) * (last - first)
        # A line that noise makes fall must not reach zero far outside.
        return max(alone, 0.5 * min(first, last)) + self.dispatches[bucket] / rounds


def measure_round_costs(
    time_dispatch: Callable[[int, int, int], float],
    buckets: Sequence[int],
    contexts: tuple[int, int],
    rounds: int,
) -> RoundCosts:
    """Times dispatches at a short and a long context, interleaved over the buckets.

    Args:
        time_dispatch: Runs a dispatch of a bucket, at a context, of so many rounds; returns its seconds. Its
            first call of a bucket may compile.
        buckets: Nodes of a tree, root included.
        contexts: Two numbers of committed tokens, in rising order.
        rounds: Of a timed dispatch, at most; at least 2.
    """
    for bucket in tqdm(buckets, desc="compiling", delay=2, disable=unseen(), leave=False):
        time_dispatch(bucket, contexts[0], 1)
    turns = {}
    for bucket in buckets:
        enough = math.ceil(DISPATCH_SECONDS / time_dispatch(bucket, contexts[0], 1))
        turns[bucket] = min(rounds, max(4, enough))
    times: dict[tuple[int, int], list[float]] = {(own, at): [] for own in buckets for at in contexts}
    beside: dict[int, list[float]] = {bucket: [] for bucket in buckets}
    for _ in tqdm(range(REPEATS), desc="round costs", delay=2, disable=unseen(), leave=False):
        for (bucket, context), own in times.items():
            # Two dispatches tell the rounds from what the dispatch takes.
            one = time_dispatch(bucket, context, 1)
            more = time_dispatch(bucket, context, turns[bucket])
            own.append((more - one) / (turns[bucket] - 1))
            beside[bucket].append(one - own[-1])
    middle = {at: max(statistics.median(own), 1e-9) for at, own in times.items()}
    return RoundCosts(
        contexts,
        {bucket: (middle[bucket, contexts[0]], middle[bucket, contexts[1]]) for bucket in buckets},
        {bucket: max(statistics.median(own), 0.0) for bucket, own in beside.items()},
    )


def timed_contexts(capacity: int, rounds: int, most: int) -> tuple[int, int, int]:
    """Two contexts to time rounds at, and how many rounds, of ``most`` tokens each, a slot then holds.

    They lie at least a quarter of the capacity apart: costs are read off the line through both, and noise
    grows with the distance from them. Two rounds run even where a slot is too small for them.
    """
    low, high = min(64, capacity // 4), max(capacity - rounds * most, capacity // 2)
    return low, high, max(2, min(rounds, (capacity - high) // most))
