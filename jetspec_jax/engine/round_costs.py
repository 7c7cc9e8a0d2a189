"""Round times by live slots, bucket and context, measured with the programs that decode.

A pair is a number of live slots and a bucket: the shape of a round's program.
"""

import math
import statistics
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from jetspec_jax.progress import waiting

#: The shape of a round: live slots, and nodes of a tree with its root.
Pair = tuple[int, int]

#: Timed pairs of dispatches per shape and context, of which the median counts; and of all shapes, at most.
REPEATS, ALL_REPEATS = 7, 60
#: Seconds of timed dispatches per shape, at most, and least repeats: noise matters less in longer rounds.
SHAPE_SECONDS, LEAST_REPEATS = 2.0, 1
#: A timed dispatch has fewer rounds than the engine's if these take longer than this.
DISPATCH_SECONDS = 0.05
#: Up to this many shapes are all timed; of more, plain ones and some trees, and the others are interpolated.
MOST_TIMED = 12


@dataclass(frozen=True)
class RoundCosts:
    """Round times by shape.

    Attributes:
        contexts: Two numbers of committed tokens, in rising order.
        seconds: Seconds of a round alone, at both contexts.
        dispatches: Seconds of a dispatch beside its rounds: the launch, and the fetch of its records.
        guessed: Shapes that were interpolated, not timed.
    """

    contexts: tuple[int, int]
    seconds: Mapping[Pair, tuple[float, float]]
    dispatches: Mapping[Pair, float]
    guessed: frozenset[Pair] = frozenset()

    def at(self, pair: Pair, context: float, rounds: float) -> float:
        """Seconds of a round after ``context`` tokens, with its share of a dispatch of ``rounds`` rounds."""
        (low, high), (first, last) = self.contexts, self.seconds[pair]
        alone = first + (context - low) / (high - low) * (last - first)
        # Noise may give a falling line, which must not reach zero far outside.
        return max(alone, 0.5 * min(first, last)) + self.dispatches[pair] / rounds

    def overlapped(self) -> "RoundCosts":
        """Costs of rounds that run while the host launches and fetches others: nothing beside the rounds."""
        return replace(self, dispatches=dict.fromkeys(self.dispatches, 0.0))

    def __or__(self, other: "RoundCosts") -> "RoundCosts":
        """The costs of the shapes of both, which were timed at the same contexts; `NO_COSTS` at none."""
        seconds, dispatches = {**self.seconds, **other.seconds}, {**self.dispatches, **other.dispatches}
        return RoundCosts(other.contexts, seconds, dispatches, self.guessed | other.guessed)

    def buckets(self, live: int) -> tuple[int, ...]:
        """Buckets of rounds of ``live`` live slots, in rising order."""
        return tuple(sorted(bucket for slots, bucket in self.seconds if slots == live))


#: Costs of no shape.
NO_COSTS = RoundCosts((0, 1), {}, {})
#: Measures round times step by step, and returns them.
Measurement = Generator[None, None, RoundCosts]


def measure_round_costs(
    time_dispatch: Callable[[Pair, int, int], float],
    pairs: Sequence[Pair],
    contexts: tuple[int, int],
    rounds: int,
) -> Measurement:
    """Times dispatches at a short and a long context, interleaved over the shapes; pauses after each.

    All shapes run, so that all are compiled; of many, not all are timed.

    Args:
        time_dispatch: Runs a dispatch of a shape, at a context, of a number of rounds; returns its seconds.
            Its first call of a shape may compile.
        pairs: All shapes.
        contexts: Two numbers of committed tokens, in rising order.
        rounds: Most rounds of a timed dispatch; at least 2.
    """
    timed = timed_pairs(pairs)
    for pair in pairs:
        time_dispatch(pair, contexts[0], 1)
        yield
    turns, turn_seconds = {}, 0.0
    for pair in timed:
        one = time_dispatch(pair, contexts[0], 1)
        yield
        turns[pair] = min(rounds, max(4, math.ceil(DISPATCH_SECONDS / one)))
        turn_seconds += len(contexts) * (1 + turns[pair]) * one
    times: dict[tuple[Pair, int], list[float]] = {(pair, at): [] for pair in timed for at in contexts}
    overheads: dict[Pair, list[float]] = {pair: [] for pair in timed}
    affordable = max(int(SHAPE_SECONDS * len(timed) / turn_seconds), LEAST_REPEATS)
    repeats = min(REPEATS, ALL_REPEATS // len(timed), affordable)
    for _ in range(repeats):
        for (pair, context), seconds in times.items():
            # The difference of two dispatches is the time of rounds alone.
            one = time_dispatch(pair, context, 1)
            more = time_dispatch(pair, context, turns[pair])
            seconds.append((more - one) / (turns[pair] - 1))
            overheads[pair].append(one - seconds[-1])
            yield
    medians = {at: max(statistics.median(seconds), 1e-9) for at, seconds in times.items()}
    rounds_alone = {pair: (medians[pair, contexts[0]], medians[pair, contexts[1]]) for pair in timed}
    dispatches = {pair: max(statistics.median(seconds), 0.0) for pair, seconds in overheads.items()}
    return complete_costs(contexts, rounds_alone, dispatches, pairs)


def measured_at_once(measurement: Measurement) -> RoundCosts:
    """The costs of a measurement that nothing interrupts."""
    with waiting("measuring round times"):
        while True:
            try:
                next(measurement)
            except StopIteration as end:
                return end.value


def timed_pairs(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    """The shapes to time, in rising order; all plain ones, since no probe corrects those later.

    Of trees: the smallest, a middle and the largest number, both of live slots and of nodes.

    Example: of 1, 2, 4, 8 and 16 live slots and buckets 1, 2, 4, … 64 these are 1, 4 and 16 live slots, each
    with 2, 8 and 64 nodes, and all plain ones.
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
    """The first, the middle and the last value."""
    return sorted({values[0], values[(len(values) - 1) // 2], values[-1]}) if values else []


def complete_costs(
    contexts: tuple[int, int],
    seconds: Mapping[Pair, tuple[float, float]],
    dispatches: Mapping[Pair, float],
    pairs: Iterable[Pair],
) -> RoundCosts:
    """Costs of all shapes, from those of the timed shapes.

    The model: a round has a fixed cost, a cost per live slot, and a cost per row, all constant between timed
    shapes and beyond the last. So costs are piecewise linear in the nodes for each number of live slots, and
    in the live slots for each number of nodes. Plain rounds draft nothing, and are interpolated apart.
    """
    return _complete(RoundCosts(contexts, seconds, dispatches), pairs, _guess)


def complete_by_rows(first: RoundCosts, pairs: Iterable[Pair]) -> RoundCosts:
    """Costs of all shapes, from those of plain rounds and of the largest trees, both with all slots live.

    The model: plain rounds cost the same with fewer slots, as they mostly read the weights. Trees cost as
    much, and more in proportion to their rows beyond those of the plain round.
    """
    (slots, _), most = min(first.seconds), max(first.seconds)
    plain, tree = (slots, 1), (slots, most[1])

    def between(values: Mapping[Pair, float], pair: Pair) -> float:
        live, bucket = pair
        if bucket == 1 or tree == plain:
            return values[plain]
        share = max(live * bucket - slots, 0) / (slots * tree[1] - slots)
        return max(values[plain] + share * (values[tree] - values[plain]), values[plain])

    return _complete(first, pairs, between)


def _complete(
    timed: RoundCosts, pairs: Iterable[Pair], guess: Callable[[Mapping[Pair, float], Pair], float]
) -> RoundCosts:
    every = sorted(set(pairs))
    low, high = ({pair: both[at] for pair, both in timed.seconds.items()} for at in (0, 1))
    return RoundCosts(
        timed.contexts,
        {pair: timed.seconds.get(pair) or (guess(low, pair), guess(high, pair)) for pair in every},
        {pair: guess(timed.dispatches, pair) for pair in every},
        frozenset(every) - frozenset(timed.seconds),
    )


def _guess(known: Mapping[Pair, float], pair: Pair) -> float:
    live, bucket = pair
    alike = {other: cost for other, cost in known.items() if (other[1] == 1) == (bucket == 1)}
    over_slots = {
        slots: _interpolate({nodes: cost for (at, nodes), cost in alike.items() if at == slots}, bucket)
        for slots, _ in alike
    }
    return _interpolate(over_slots, live)


def _interpolate(points: Mapping[int, float], x: float) -> float:
    """Piecewise linear interpolation at x; the last segment extrapolates."""
    places = sorted(points)
    if x in points or len(places) == 1:
        return points.get(int(x), points[places[0]])
    after = next((index for index, place in enumerate(places) if place > x), len(places) - 1)
    left, right = places[max(after, 1) - 1], places[max(after, 1)]
    share = (x - left) / (right - left)
    # Noise may give a falling segment, but no round is free.
    return max(points[left] + share * (points[right] - points[left]), 0.5 * min(points.values()))


def timed_contexts(capacity: int, rounds: int, most: int) -> tuple[int, int, int]:
    """Two contexts to time rounds at, and how many rounds, of ``most`` tokens each, a slot then has room for.

    The contexts are at least a quarter of the capacity apart: costs are extrapolated from both, and noise
    grows with the distance from them. Two rounds run even if a slot is too small for them.
    """
    low, high = min(64, capacity // 4), max(capacity - rounds * most, capacity // 2)
    return low, high, max(2, min(rounds, (capacity - high) // most))
