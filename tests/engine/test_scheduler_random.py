"""The scheduler over thousands of random events, with too few pages, and with one or two batches in flight.

The device runs each batch when it is launched; when its results are fetched is left to chance.
"""

import collections
from dataclasses import dataclass, field

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.engine.output import Output
from jetspec_jax.engine.request import DeadlinePassed, Request, State
from jetspec_jax.engine.scheduler import MOST_OVERTAKEN, QueueFull, Scheduler, check_room
from jetspec_jax.engine.size import EngineSize
from tests.decode.tiny import busy, check_pool, check_snapshots, free_pages
from tests.engine.fake_device import VOCAB, FakeDevice, expected_tokens
from tests.marks import wide

#: Seconds of a batch, on a clock of the test's own.
BATCH = 0.01


class AnyBucket:
    """A policy of random buckets; counts the dispatches that it has not observed yet."""

    def __init__(self, size, rng):
        self._size, self._rng, self.open = size, rng, 0

    def choose(self, live, waiting, forwards, shape_of):
        self.open += 1
        slots, bucket = self._size.live_for(len(live)), int(self._rng.choice([1, 2, 16]))
        return shape_of(slots, bucket), int(self._rng.integers(1, 12))

    def observe(self, record):
        self.open -= bool(record.batch.live)


@dataclass
class World:
    """A scheduler over a device, and requests that come and go; some callers leave when they see a token."""

    size: EngineSize
    round_tokens: int
    seed: int
    overlapped: bool
    most_waiting: int | None = None
    requests: list = field(default_factory=list)
    ends: collections.Counter = field(default_factory=collections.Counter)

    def __post_init__(self):
        self.rng, self.now = np.random.default_rng(self.seed), 100.0
        policy = AnyBucket(self.size, np.random.default_rng([self.seed, 2]))
        self.scheduler = Scheduler(self.size, policy, self.round_tokens, overlapped=self.overlapped)
        pool = self.scheduler.pool
        self.device = FakeDevice(self.size, self.round_tokens, self.seed, pool, ahead=self.overlapped)
        self.texts = [self.rng.integers(0, VOCAB, self.size.capacity).astype(np.int32) for _ in range(3)]
        self.readers, self.refused, self.live = {}, 0, []
        self.in_flight, self.watched, self.counts = collections.deque(), {}, collections.Counter()
        evict = pool._evict

        def counted():
            self.counts["evictions"] += 1
            return evict()

        pool._evict = counted

    def request(self):
        """A prompt that begins like others, with whatever a caller may ask for."""
        rng, capacity = self.rng, self.size.capacity
        most, more = int(rng.integers(1, 300)), int(rng.integers(1, 90))
        begin, end = self.texts[int(rng.integers(3))][: int(rng.choice([0, 64, 100, 128, 192]))], []
        if len(begin) == 0 or rng.random() < 0.8:
            end = rng.integers(0, VOCAB, more)
        prompt = np.concatenate([begin, end])[: capacity - most]
        return Request(
            prompt.astype(np.int32),
            SamplingParams(max_tokens=most, seed=int(rng.integers(2**32)), temperature=1.0),
            frozenset(rng.integers(0, VOCAB, int(rng.integers(0, 12))).tolist()),
            priority=int(rng.choice([0, 0, 0, 1, 2])),
            deadline=self.now + float(rng.exponential(0.5)) if rng.random() < 0.1 else None,
            cache_salt=[None, None, "one"][int(rng.integers(3))],
        )

    def arrive(self):
        request = self.request()
        if self.most_waiting is not None:
            try:
                waiting = sum(other.state is State.WAITING for other in self.scheduler.requests)
                check_room(waiting, 1, self.most_waiting)
            except QueueFull:
                self.refused += 1
                return
        self.scheduler.add(request, self.now)
        if self.rng.random() < 0.1:
            self.readers[request] = Output(request, None)
        self.requests.append(request)
        self.live.append(request)
        if self.rng.random() < 0.3:
            self.watched[request] = set(self.rng.integers(0, VOCAB, 15).tolist())

    def leave(self):
        """Somebody cancels, or is gone without a word."""
        if not self.live:
            return
        request = self.live[int(self.rng.integers(len(self.live)))]
        if not request.open:
            return
        if self.readers.pop(request, None) is not None:
            self.ends["unread"] += 1
        else:
            request.cancel()
            self.ends["cancelled"] += 1

    def step(self):
        """Launches or fetches."""
        if self.in_flight and (not self.scheduler.has_room or self.rng.random() < 0.5):
            self.fetch()
        else:
            self.launch()
        if self.rng.random() < 0.3:
            self.check()
        if len(self.live) < 3 * self.size.slots and self.rng.random() < 0.3:
            self.arrive()
        if self.rng.random() < 0.01:
            self.leave()
        self.now += BATCH / 2
        self.live = [request for request in self.live if request.open]

    def launch(self):
        before = sum(request.preemptions for request in self.requests)
        batch = self.scheduler.next_batch(now=self.now)
        if batch is None:
            assert self.in_flight or not busy(self.scheduler), "waits for nothing"
            if self.in_flight:
                self.counts["waits"] += 1
                self.fetch()
            return
        preempted = sum(request.preemptions for request in self.requests) - before
        assert not (preempted and self.in_flight), "a request was preempted whose tokens were not known"
        assert not self.overlapped or batch.rounds in (0, 1)
        self.counts["ahead"] += bool(self.in_flight)
        self.in_flight.append(self.device.run(batch))
        flying = [len(decoding) for _, _, decoding in self.scheduler._in_flight]
        assert sum(request.in_flight_tokens > 0 for request in self.requests) <= sum(flying)

    def fetch(self):
        record = self.in_flight.popleft()
        ran = (record.tree_sizes > 0).any()
        served = self.scheduler.update(record, self.now)
        self.counts["idle"] += self.scheduler.idle_rounds
        if len(record.batch.live) and not ran:
            assert not served or self.overlapped
            self.counts["empty"] += 1
        for request in served:
            # As a caller that finds a stop string, perhaps while the next round is in flight.
            if not self.watched.get(request, set()).isdisjoint(request.tokens) and request.open:
                request.cancel()
                self.counts["stopped"] += 1

    def check(self):
        scheduler = self.scheduler
        holding = [request for request in self.requests if request.pages]
        check_pool(scheduler.pool, [request.pages for request in holding])
        check_snapshots(scheduler._allocator.snapshots)
        slots = [request.slot for request in scheduler.requests if request.slot >= 0]
        assert len(set(slots)) == len(slots)
        for request in holding:
            assert request.slot >= 0
            assert len(request.pages) <= request.num_pages
            # Who shares a page has the same salt, and the same tokens up to its end.
            for index, page in enumerate(request.pages[: request.cached_pages]):
                others = [other for other in holding if other is not request and page in other.pages]
                assert all(other.pages[index] == page for other in others)
                assert all(other.cache_salt == request.cache_salt for other in others)
                end = 64 * (index + 1)
                assert all((other.span(0, end) == request.span(0, end)).all() for other in others)

    def step_quietly(self):
        self.now += BATCH
        if not self.scheduler.has_room:
            self.fetch()
        else:
            self.launch()

    def finish(self):
        for _ in range(20_000):
            if not busy(self.scheduler):
                break
            self.step_quietly()
        else:
            raise AssertionError("no progress")
        while self.in_flight:
            self.fetch()
        assert self.scheduler.next_batch(now=self.now) is None
        assert self.device.slots.keys() == self.scheduler._occupied  # the next batch releases them
        self.check()
        assert free_pages(self.scheduler) == self.scheduler.pool.num_free == self.size.num_pages
        assert self.scheduler.policy.open == 0
        assert all(request.in_flight_tokens == 0 for request in self.requests)

    def check_outputs(self):
        """What each has got is what it gets alone, up to where it ended."""
        for request in self.requests:
            ends = {None: State.CANCELLED, "error": State.FAILED}
            assert request.state is ends.get(request.finish_reason, State.FINISHED)
            expected = expected_tokens(request)
            assert request.tokens == expected[: len(request.tokens)]
            if request.finish_reason in ("length", "stop"):
                assert request.tokens == expected
                assert request.finish_reason == ("stop" if expected[-1] in request.stop_ids else "length")
                assert request.arrival <= request.started <= request.first_token <= request.ended
            elif request.finish_reason == "error":
                assert isinstance(request.error, DeadlinePassed)
                assert request.deadline <= self.now
            self.ends[request.finish_reason] += 1


SHAPES = ((1, 128),), ((1, 64), (2, 32), (2, 128)), ((1, 16), (1, 256))


def world_of(seed, overlapped):
    """A machine of some kind with few pages."""
    slots = (2, 4, 8, 8)[seed % 4]
    size = EngineSize(
        slots,
        capacity=448,
        num_pages=(8, 9, 10, 12)[seed % 4],
        chunks=SHAPES[seed % 3],
        live=((), (1, 2, 4))[seed % 2][: slots.bit_length() - 1],
        prefill_tokens=(None, 100, 300)[seed % 3],
        pages_alone=seed not in (2, 5, 7, 9),
        snapshots={2: 4, 7: 8, 9: 1}.get(seed, 0),
    )
    return World(size, (1, 4, 10, 17)[(seed + seed // 4) % 4], seed, overlapped, (None, 12)[seed % 2])


@pytest.mark.usefixtures("no_type_checks")  # ten times faster
@pytest.mark.parametrize("overlapped", [True, wide(False)])
@pytest.mark.parametrize("seed", [0, 1, wide(2), 3, wide(4), wide(5), wide(7), wide(9)])
def test_nothing_is_lost_mixed_up_or_left_over(seed, overlapped):
    world = world_of(seed, overlapped)
    while len(world.requests) < 300:
        world.step()
    world.finish()
    world.check_outputs()
    for end in ("length", "stop", "error", "cancelled"):
        assert world.ends[end] > 0, end
    assert sum(request.preemptions > 0 for request in world.requests) > 2
    assert (sum(request.prefix_tokens > 0 for request in world.requests) > 5) == world.size.shares_pages
    assert (world.counts["evictions"] > 10) == world.size.shares_pages
    assert world.counts["stopped"] > 5
    assert (world.device.restored > 2) == (world.size.snapshots > 0)
    assert world.device.kept > world.size.snapshots or not world.size.snapshots
    assert max(request.overtaken for request in world.requests) < 2 * MOST_OVERTAKEN
    assert world.most_waiting is not None or not world.refused
    assert (world.counts["ahead"] > 50) == overlapped
    if overlapped:
        assert world.counts["idle"] > 20
        assert world.counts["waits"] > 5, "neither pages nor requests ever ran out"
    else:
        assert world.device.paused > 0
