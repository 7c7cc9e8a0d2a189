"""What a round costs on this device, by bucket and context: measured once, with the programs that decode."""

import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from tqdm import tqdm

from jetspec_jax.cache.stores import Slots
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.state import DecodeState, DecodeWeights, join, split

#: Timed dispatches of each bucket and context, whose median counts: as many as these seconds allow.
LEAST_REPEATS, MOST_REPEATS, SECONDS = 5, 25, 2.0
#: A dispatch of fewer rounds than the engine's will do where those take longer than this.
DISPATCH_SECONDS = 0.05
# More than any dispatch emits: no slot may stop while it is timed.
_ENDLESS = 2**30

#: Of what is kept: costs of another version are measured anew.
VERSION = 9

_log = logging.getLogger("jetspec_jax")
_measured: dict[str, "RoundCosts"] = {}


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of the rounds of K buckets.

    Attributes:
        contexts: Two numbers of committed tokens.
        seconds: Of a round alone, for each bucket, at both contexts.
        dispatches: What a dispatch takes beside its rounds, for each bucket: the launch, and the wait for its
            records.
        feed: What it takes to show the proposer `FEED_ROWS` tokens of a slot that it has not seen.
    """

    contexts: tuple[int, int]
    seconds: tuple[tuple[float, float], ...]
    dispatches: tuple[float, ...]
    feed: float

    def at(self, bucket: int, context: float, rounds: float) -> float:
        """Seconds of a round of a bucket behind so many tokens, in a dispatch of so many rounds.

        They lie on the line through what was measured, with a share of the dispatch.
        """
        (low, high), (first, last) = self.contexts, self.seconds[bucket]
        alone = first + (context - low) / (high - low) * (last - first)
        # A line that noise makes fall must not reach zero far outside.
        return max(alone, 0.5 * min(first, last)) + self.dispatches[bucket] / rounds


def round_costs(
    decoders: Sequence[TreeDecoder],
    weights: DecodeWeights,
    state: DecodeState,
    *,
    num_pages: int,
    page_size: int,
    rounds: int,
    folder: Path | None = None,
) -> tuple[RoundCosts, DecodeState]:
    """The costs of some decoders' rounds: known to this process, or to an earlier one, or measured now.

    Afterwards the programs of all decoders are compiled, so that a change of the bucket compiles nothing.

    Args:
        decoders: One for each bucket.
        weights: The parameters.
        state: A state of free slots; donated.
        num_pages: P, of the pool that its block tables name.
        page_size: Tokens of a page of its stores.
        rounds: Of a timed dispatch, at most.
        folder: Where costs are kept between processes. None is the user's cache folder; on a CPU, whose speed
            depends on what else it does, they are not kept.

    Returns:
        The costs, and a state of free slots.
    """
    device = jax.devices()[0]
    shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), state)
    described = repr((device.device_kind, jax.__version__, VERSION, decoders, shapes, rounds))
    key = hashlib.sha256(described.encode()).hexdigest()
    if key in _measured:
        return _measured[key], state
    kept = None
    if folder is not None or device.platform != "cpu":
        kept = (folder or platformdirs.user_cache_path("jetspec_jax", appauthor=False)) / "costs.json"
    found = _read(kept).get(key)
    if found is not None:
        costs = RoundCosts(
            tuple(found["contexts"]),
            tuple(map(tuple, found["seconds"])),
            tuple(found["dispatches"]),
            found["feed"],
        )
        clock = _Clock(weights, state, num_pages)
        clock.compile(decoders)
        state = clock.free_slots()
    else:
        costs, state = measure_round_costs(
            decoders, weights, state, num_pages=num_pages, page_size=page_size, rounds=rounds
        )
        _keep(kept, key, {"device": device.device_kind, **asdict(costs)})
    _measured[key] = costs
    return costs, state


def measure_round_costs(
    decoders: Sequence[TreeDecoder],
    weights: DecodeWeights,
    state: DecodeState,
    *,
    num_pages: int,
    page_size: int,
    rounds: int,
) -> tuple[RoundCosts, DecodeState]:
    """Times dispatches of greedy rounds behind a short and a long context, interleaved over the buckets.

    The arguments and what is returned are those of `round_costs`.
    """
    capacity = page_size * state.slots.block_tables.shape[1]
    low, high, rounds = timed_contexts(capacity, rounds, 1 + max(decoder.depth for decoder in decoders))
    contexts = low, high
    clock = _Clock(weights, state, num_pages)
    times: dict[tuple[int, int], list[float]] = {
        (bucket, context): [] for bucket in range(len(decoders)) for context in contexts
    }
    beside: list[list[float]] = [[] for _ in decoders]
    feeds: list[float] = []
    clock.compile(decoders)
    turns = [
        min(rounds, max(4, math.ceil(DISPATCH_SECONDS / clock.seconds(decoder, low, 1))))
        for decoder in decoders
    ]
    started = time.perf_counter()
    for repeat in tqdm(range(MOST_REPEATS), desc="round costs", delay=2, disable=None, leave=False):
        if repeat >= LEAST_REPEATS and time.perf_counter() - started > SECONDS:
            break
        for (bucket, context), own in times.items():
            # Two dispatches tell the rounds from what the dispatch takes.
            one = clock.seconds(decoders[bucket], context, 1)
            more = clock.seconds(decoders[bucket], context, turns[bucket])
            own.append((more - one) / (turns[bucket] - 1))
            beside[bucket].append(one - own[-1])
        feeds.append(clock.feed_seconds(decoders[0], low, 2) - clock.feed_seconds(decoders[0], low, 1))

    def median(bucket: int, context: int) -> float:
        return max(statistics.median(times[bucket, context]), 1e-9)

    seconds = tuple((median(i, low), median(i, high)) for i in range(len(decoders)))
    dispatches = tuple(max(statistics.median(own), 0.0) for own in beside)
    feed = max(statistics.median(feeds), 0.0)
    return RoundCosts(contexts, seconds, dispatches, feed), clock.free_slots()


def timed_contexts(capacity: int, rounds: int, most: int) -> tuple[int, int, int]:
    """Two contexts to time rounds behind, and how many rounds, of ``most`` tokens each, a slot then holds.

    They lie at least a quarter of the capacity apart: costs are read off the line through both, and noise
    grows with the distance from them. Two rounds run even where a slot is too small for them.
    """
    low, high = min(64, capacity // 4), max(capacity - rounds * most, capacity // 2)
    return low, high, max(2, min(rounds, (capacity - high) // most))


class _Clock:
    """Slots in the midst of a sequence, and the time of rounds from there."""

    def __init__(self, weights: DecodeWeights, state: DecodeState, num_pages: int):
        self._weights, self._state = weights, state
        self._free = jax.tree.map(jnp.copy, split(state)[1])
        batch, pages = state.slots.block_tables.shape
        # Where there are fewer pages than all slots could name, several slots name one.
        names = np.arange(batch * pages, dtype=np.int32) % num_pages
        self._tables = names.reshape(batch, pages)

    def compile(self, decoders: Sequence[TreeDecoder]) -> None:
        """Runs every decoder once, and what shows plain rounds to the proposer."""
        for decoder in tqdm(decoders, desc="compiling", delay=2, disable=None, leave=False):
            self._state, _ = decoder.decode(self._weights, self._start(decoder, 1), np.int32(1))

    def seconds(self, decoder: TreeDecoder, context: int, rounds: int) -> float:
        """Seconds of one dispatch, until its records are on the host."""
        state = self._start(decoder, context)
        decode = decoder.decode_unfed if decoder.feeds_late else decoder.decode
        started = time.perf_counter()
        self._state, records = decode(self._weights, state, np.int32(rounds))
        jax.device_get(records)
        return time.perf_counter() - started

    def feed_seconds(self, decoder: TreeDecoder, context: int, feeds: int) -> float:
        """Seconds until the proposer has seen the first tokens of a slot, in so many launches.

        Those that count are at most as many as the context has; what fills the launches up takes as long.
        """
        state = self._start(decoder, context)
        if state.unseen is None:
            return 0.0
        started = time.perf_counter()
        for _ in range(feeds):
            state = decoder.feed(self._weights, state, np.int32(0), np.int32(0))
        jax.block_until_ready(state.proposer)
        self._state = state
        return time.perf_counter() - started

    def _start(self, decoder: TreeDecoder, context: int) -> DecodeState:
        """All slots in the midst of a sequence."""
        batch = len(self._tables)
        settings = self._state.settings._replace(
            budget=jnp.full(batch, decoder.bucket, jnp.int32),
            depth=jnp.full(batch, decoder.depth, jnp.int32),
            remaining=jnp.full(batch, _ENDLESS, jnp.int32),
        )
        state = replace(
            self._state,
            slots=Slots.of(jnp.asarray(self._tables), jnp.full(batch, context, jnp.int32)),
            active=jnp.ones(batch, bool),
            settings=settings,
        )
        return jax.block_until_ready(state)

    def free_slots(self) -> DecodeState:
        """The state with its slots free, as it came; what their pages hold nobody reads."""
        return join(split(self._state)[0], self._free)


def _read(path: Path | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("round costs are measured anew: cannot read %s: %s", path, error)
        return {}
    if not isinstance(entries, dict):
        _log.warning("round costs are measured anew: %s holds no JSON object", path)
        return {}
    return entries


def _keep(path: Path | None, key: str, entry: Mapping[str, Any]) -> None:
    if path is None:
        return
    partial = path.with_name(f"{path.name}.{key[:8]}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({**_read(path), key: entry}), encoding="utf-8")
        try:
            partial.rename(path)
        except OSError:
            partial.unlink()
            raise
    except OSError as error:
        _log.warning("round costs are not kept: cannot write %s: %s", path, error.strerror)
