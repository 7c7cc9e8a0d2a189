"""What a round costs here, by live slots, bucket and context: measured with the programs that decode.

A pair is a number of live slots and a bucket: the shape of a round's program.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from jetspec_jax.progress import unseen

#: The shape of a round: live slots, and nodes of a tree with its root.
Pair = tuple[int, int]

#: Timed pairs of dispatches of each shape and context, whose median counts; and of all shapes, at most.
REPEATS, ALL_REPEATS = 7, 60
#: All timed dispatches together take about so many seconds for each shape at most, but each runs at least so
#: often: the longer a round is, the less noise weighs.
SHAPE_SECONDS, LEAST_REPEATS = 2.0, 1
#: A timed dispatch has fewer rounds than the engine's where those take longer than this.
DISPATCH_SECONDS = 0.05
#: Shapes that are all timed; of more, plain ones and some trees, and the others lie on planes between them.
MOST_TIMED = 12


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the rounds of each shape.

    Attributes:
        contexts: Two numbers of committed tokens, in rising order.
        seconds: Of a round alone, at both contexts.
        dispatches: What a dispatch takes beside its rounds: the launch, and the wait for its records.
        guessed: Shapes that were not timed.
    """

    contexts: tuple[int, int]
    seconds: Mapping[Pair, tuple[float, float]]
    dispatches: Mapping[Pair, float]
    guessed: frozenset[Pair] = frozenset()

    def at(self, pair: Pair, context: float, rounds: float) -> float:
        """Seconds of a round after so many tokens, with its share of a dispatch of so many rounds."""
        (low, high), (first, last) = self.contexts, self.seconds[pair]
        alone = first + (context - low) / (high - low) * (last - first)
        # A line that noise makes fall must not reach zero far outside.
        return max(alone, 0.5 * min(first, last)) + self.dispatches[pair] / rounds

    def buckets(self, live: int) -> tuple[int, ...]:
        """Buckets of the rounds of so many live slots, in rising order."""
        return tuple(sorted(bucket for slots, bucket in self.seconds if slots == live))


def measure_round_costs(
    time_dispatch: Callable[[Pair, int, int], float],
    pairs: Sequence[Pair],
    contexts: tuple[int, int],
    rounds: int,
) -> RoundCosts:
    """Times dispatches at a short and a long context, interleaved over the shapes.

    All shapes run, so that all are compiled; of many not all are timed.

    Args:
        time_dispatch: Runs a dispatch of a shape, at a context, of so many rounds; returns its seconds. Its
            first call of a shape may compile.
        pairs: All shapes that there are.
        contexts: Two numbers of committed tokens, in rising order.
        rounds: Of a timed dispatch, at most; at least 2.
    """
    timed = timed_pairs(pairs)
    for pair in tqdm(pairs, desc="compiling", delay=2, disable=unseen(), leave=False):
        time_dispatch(pair, contexts[0], 1)
    turns, turn_seconds = {}, 0.0
    for pair in timed:
        one = time_dispatch(pair, contexts[0], 1)
        turns[pair] = min(rounds, max(4, math.ceil(DISPATCH_SECONDS / one)))
        turn_seconds += len(contexts) * (1 + turns[pair]) * one
    times: dict[tuple[Pair, int], list[float]] = {(own, at): [] for own in timed for at in contexts}
    beside: dict[Pair, list[float]] = {pair: [] for pair in timed}
    affordable = max(int(SHAPE_SECONDS * len(timed) / turn_seconds), LEAST_REPEATS)
    repeats = min(REPEATS, ALL_REPEATS // len(timed), affordable)
    for _ in tqdm(range(repeats), desc="round costs", delay=2, disable=unseen(), leave=False):
        for (pair, context), own in times.items():
            # Two dispatches tell the rounds from what the dispatch takes.
            one = time_dispatch(pair, context, 1)
            more = time_dispatch(pair, context, turns[pair])
            own.append((more - one) / (turns[pair] - 1))
            beside[pair].append(one - own[-1])
    middle = {at: max(statistics.median(own), 1e-9) for at, own in times.items()}
    known = {pair: (middle[pair, contexts[0]], middle[pair, contexts[1]]) for pair in timed}
    own_cost = {pair: max(statistics.median(own), 0.0) for pair, own in beside.items()}
    return complete_costs(contexts, known, own_cost, pairs)


def timed_pairs(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """The shapes to time, in rising order: of many all plain ones, since nothing probes those later.

    Of trees these are a corner, a middle and an end in both directions.

    Example: of 1, 2, 4, 8 and 16 live slots and buckets 1, 2, 4, … 64 these are 1, 4 and 16 live slots, each
    with 2, 8 and 64 nodes, and all of 1 node.
    """
    every = sorted(set(pairs))
    if len(every) <= MOST_TIMED:
        return tuple(every)
    chosen = [(live, bucket) for live, bucket in every if bucket == 1]
    for live in _spread(sorted({slots for slots, _ in every})):
        trees = [bucket for slots, bucket in every if slots == live and bucket > 1]
        chosen += [(live, bucket) for bucket in _spread(trees)]
    return tuple(sorted(chosen))


def _spread(values: Sequence[int]) -> list[int]:
    """The first, the last, and the one in the middle."""
    return sorted({values[0], values[(len(values) - 1) // 2], values[-1]}) if values else []


def complete_costs(
    contexts: tuple[int, int],
    seconds: Mapping[Pair, tuple[float, float]],
    dispatches: Mapping[Pair, float],
    pairs: Iterable[Pair],
) -> RoundCosts:
    """Costs of all shapes, from those of some.

    The model: a round costs something, so much more for each live slot, and so much more for each of its
    rows; between timed shapes, and beyond the last, these three are the same. So costs lie on a line over the
    nodes for a number of live slots, and on a line over the live slots for a number of nodes. Plain rounds
    draft nothing, and have a line of their own.
    """
    every = sorted(set(pairs))
    low, high = ({pair: own[at] for pair, own in seconds.items()} for at in (0, 1))
    return RoundCosts(
        contexts,
        {pair: (_guess(low, pair), _guess(high, pair)) for pair in every},
        {pair: _guess(dispatches, pair) for pair in every},
        frozenset(every) - frozenset(seconds),
    )


def _guess(known: Mapping[Pair, float], pair: Pair) -> float:
    live, bucket = pair
    alike = {own: cost for own, cost in known.items() if (own[1] == 1) == (bucket == 1)}
    over_slots = {
        slots: _on_line({nodes: cost for (at, nodes), cost in alike.items() if at == slots}, bucket)
        for slots, _ in alike
    }
    return _on_line(over_slots, live)


def _on_line(points: Mapping[int, float], x: float) -> float:
    """The value at x of straight lines from point to point; beyond them the last line goes on."""
    places = sorted(points)
    if x in points or len(places) == 1:
        return points.get(int(x), points[places[0]])
    after = next((index for index, place in enumerate(places) if place > x), len(places) - 1)
    left, right = places[max(after, 1) - 1], places[max(after, 1)]
    share = (x - left) / (right - left)
    # Noise may make a line fall, but nothing costs nothing.
    return max(points[left] + share * (points[right] - points[left]), 0.5 * min(points.values()))


def timed_contexts(capacity: int, rounds: int, most: int) -> tuple[int, int, int]:
    """Two contexts to time rounds at, and how many rounds, of ``most`` tokens each, a slot then holds.

    They lie at least a quarter of the capacity apart: costs are read off the line through both, and noise
    grows with the distance from them. Two rounds run even where a slot is too small for them.
    """
    low, high = min(64, capacity // 4), max(capacity - rounds * most, capacity // 2)
    return low, high, max(2, min(rounds, (capacity - high) // most))
