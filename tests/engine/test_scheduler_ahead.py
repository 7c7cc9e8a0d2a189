"""The scheduler with two batches in flight, over thousands of random events, with too few pages.

The device runs each batch when it is launched; when its results are fetched is left to chance.
"""

import collections

import numpy as np
import pytest

from jetspec_jax.engine.scheduler import Scheduler
from tests.decode.tiny import busy, free_pages
from tests.engine.fake_device import VOCAB, FakeDevice
from tests.engine.test_scheduler_random import BATCH, World, world_of
from tests.marks import wide


class AnyBucket:
    """Any bucket; counts what it is told."""

    def __init__(self, size, rng):
        self._size, self._rng, self.open = size, rng, 0

    def choose(self, live, waiting, forwards, shape_of):
        self.open += 1
        slots, bucket = self._size.live_for(len(live)), int(self._rng.choice([1, 2, 16]))
        return shape_of(slots, bucket), int(self._rng.integers(1, 12))

    def observe(self, record):
        self.open -= bool(record.batch.live)


class AheadWorld(World):
    """Batches are launched and fetched at random times; some callers leave when they see a token."""

    overlapped = False

    def __post_init__(self):
        super().__post_init__()
        policy = AnyBucket(self.size, np.random.default_rng([self.seed, 2]))
        self.scheduler = Scheduler(self.size, policy, self.round_tokens, overlapped=self.overlapped)
        pool = self.scheduler.pool
        self.device = FakeDevice(self.size, self.round_tokens, self.seed, pool, ahead=True)
        self.in_flight, self.watched, self.counts = collections.deque(), {}, collections.Counter()
        evict = pool._evict

        def counted():
            self.counts["evictions"] += 1
            return evict()

        pool._evict = counted

    def arrive(self):
        before = len(self.requests)
        super().arrive()
        if len(self.requests) > before and self.rng.random() < 0.3:
            self.watched[self.requests[-1]] = set(self.rng.integers(0, VOCAB, 15).tolist())

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


@pytest.mark.usefixtures("no_type_checks")
@pytest.mark.parametrize("overlapped", [True, wide(False)])
@pytest.mark.parametrize("seed", [0, 1, wide(2), 3, wide(4), wide(5), wide(7), wide(9)])
def test_nothing_is_lost_whenever_results_are_fetched(seed, overlapped):
    made = world_of(seed)
    world = type("Made", (AheadWorld,), {"overlapped": overlapped})(
        made.size, made.round_tokens, seed, most_waiting=made.most_waiting
    )
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
    assert (world.counts["ahead"] > 50) == overlapped
    if overlapped:
        assert world.counts["idle"] > 20
        assert world.counts["waits"] > 5, "neither pages nor requests ever ran out"
