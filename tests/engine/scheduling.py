"""Schedulers before a device that is made of NumPy, and requests for them."""

import math

import numpy as np

from jetspec_jax import SamplingParams
from jetspec_jax.engine.policy import FixedBudget
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.scheduler import Scheduler
from jetspec_jax.engine.size import EngineSize
from tests.decode.tiny import Limited, at_once, busy
from tests.engine.fake_device import VOCAB, FakeDevice, expected_tokens

BUCKET = 16
# Prompts of a forward, and rows of each.
CHUNKS = ((1, 128), (2, 64))
# Tokens of a round: always as many, whatever is left.
STEP = 3


def request(length, tokens, *, start=0, stop_ids=(), seed=1, settings=None, **fields):
    prompt = (np.arange(start, start + length) % VOCAB).astype(np.int32)
    params = SamplingParams(max_tokens=tokens, seed=seed, **(settings or {}))
    return Request(prompt, params, frozenset(stop_ids), BUCKET, **fields)


class Even(FakeDevice):
    """Every round commits `STEP` tokens."""

    def _round(self, slot, count):
        return super()._round(slot, min(STEP, self.round_tokens))


def make(slots=2, pages=8, capacity=256, policy=None, most=STEP, **size):
    """A scheduler and its device."""
    size = EngineSize(slots, capacity, pages, **{"chunks": CHUNKS, **size})
    policy = (
        at_once(FixedBudget(size.rounds((BUCKET,))), size.rounds((BUCKET,))) if policy is None else policy
    )
    scheduler = Scheduler(size, Limited(policy), most)
    return scheduler, Even(size, most, pool=scheduler.pool)


def add(scheduler, *requests):
    for each in requests:
        scheduler.add(each)
    return requests


def next_batch(scheduler, rounds=math.inf, now=None):
    scheduler.policy.most = rounds
    return scheduler.next_batch(now)


def step(scheduler, device, rounds=math.inf, now=None):
    batch = next_batch(scheduler, rounds, now)
    if batch is not None:
        scheduler.update(device.run(batch), now)
    return batch


def finish(scheduler, device):
    for _ in range(1000):
        if not busy(scheduler):
            return
        step(scheduler, device)
    raise AssertionError("no progress")


def assert_served(*requests):
    for each in requests:
        assert each.tokens == expected_tokens(each)
        assert each.finish_reason == "length"


def slots_of(batch):
    return [admission.slot for admission in batch.admissions]
