"""The scheduler over thousands of random events, with too few pages."""

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
ENDS = ("length", "stop", "error", "cancelled", "unread")


class Anything:
    """Any bucket and any number of rounds."""

    def __init__(self, size, rng):
        self._size, self._rng = size, rng

    def choose(self, live, waiting, forwards, shape_of):
        slots, bucket = self._size.live_for(len(live)), int(self._rng.choice([1, 2, 16]))
        return shape_of(slots, bucket), int(self._rng.integers(1, 12))

    def observe(self, record):
        assert record.tree_sizes.any() == bool(record.batch.live)


@dataclass
class World:
    """A scheduler over a device, and the requests that come and go."""

    size: EngineSize
    round_tokens: int
    seed: int
    most_waiting: int | None = None
    requests: list = field(default_factory=list)
    ends: collections.Counter = field(default_factory=collections.Counter)

    def __post_init__(self):
        self.rng, self.now = np.random.default_rng(self.seed), 100.0
        policy = Anything(self.size, np.random.default_rng([self.seed, 1]))
        self.scheduler = Scheduler(self.size, policy, self.round_tokens)
        self.device = FakeDevice(self.size, self.round_tokens, self.seed, self.scheduler.pool)
        self.texts = [self.rng.integers(0, VOCAB, self.size.capacity).astype(np.int32) for _ in range(3)]
        self.readers, self.refused, self.live = {}, 0, []

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
        """One batch, in the middle of which requests come and go."""
        scheduler = self.scheduler
        batch = scheduler.next_batch(now=self.now)
        self.check()
        if batch is None:  # nobody is there
            assert not busy(scheduler)
            self.now += BATCH
            self.arrive()
            return
        if self.rng.random() < 0.3:
            self.arrive()
        if self.rng.random() < 0.1:
            self.leave()
        record = self.device.run(batch)
        self.now += BATCH
        served = scheduler.update(record, self.now)
        assert not batch.rounds or (record.tree_sizes > 0).any(), "no progress"
        assert all(request.tokens for request in served if request.open)
        self.check()
        self.live = [request for request in self.live if request.open]

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

    def finish(self):
        for _ in range(20_000):
            if not busy(self.scheduler):
                break
            self.step_quietly()
        else:
            raise AssertionError("no progress")
        assert self.scheduler.next_batch(now=self.now) is None
        assert self.device.slots.keys() == self.scheduler._occupied  # the next batch releases them
        self.check()
        assert free_pages(self.scheduler) == self.scheduler.pool.num_free == self.size.num_pages

    def step_quietly(self):
        if (batch := self.scheduler.next_batch(now=self.now)) is not None:
            self.scheduler.update(self.device.run(batch), self.now)
        self.now += BATCH

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


def world_of(seed):
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
    return World(size, (1, 4, 10, 17)[(seed + seed // 4) % 4], seed, most_waiting=(None, 12)[seed % 2])


@pytest.mark.wide
@pytest.mark.usefixtures("no_type_checks")  # ten times faster
@pytest.mark.parametrize("seed", [0, wide(1), 2, 3, wide(4), 5, wide(6), wide(7), wide(9)])
def test_nothing_is_lost_mixed_up_or_left_over(seed):
    world = world_of(seed)
    for _ in range(500):
        for _ in range(int(world.rng.poisson(0.7))):
            world.arrive()
        if world.rng.random() < 0.05:
            world.leave()
        world.step()
    world.finish()
    world.check_outputs()
    assert len(world.requests) > 100
    for end in ("length", "stop", "error", "cancelled"):
        assert world.ends[end] > 0
    assert sum(request.preemptions > 0 for request in world.requests) > 5
    assert (sum(request.prefix_tokens > 0 for request in world.requests) > 10) == world.size.shares_pages
    assert world.device.paused > 0
    assert (world.device.restored > 10) == (world.size.snapshots > 0)
    assert world.device.kept > world.size.snapshots or not world.size.snapshots
    assert max(request.overtaken for request in world.requests) < 2 * MOST_OVERTAKEN
    assert (world.refused > 0) == (world.most_waiting is not None)
