"""Thousands of short requests, a third of them cancelled: pages, objects and memory stay what they were."""

import ctypes
import gc
from pathlib import Path

import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.decode.settings import TreeSettings
from tests.decode.tiny import TINY, TinyEngine, check_pool, finish, random_head, random_target, with_windows

COUNT, SETTLED = 5000, 1000
SLOTS, PAGES = 16, 40
MOST_GROWTH, MOST_OBJECTS = 30 * 2**20, 500


def resident_bytes():
    """Memory of this process, without what the C library keeps for later."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def objects_and_bytes():
    gc.collect()
    return len(gc.get_objects()), resident_bytes()


def submit_some(engine, rng, begins, count):
    """Short requests, of which many begin alike."""
    made = []
    for _ in range(count):
        begin = begins[int(rng.integers(len(begins)))][: int(rng.choice([0, 0, 64, 70]))]
        prompt = begin + rng.integers(0, 64, int(rng.integers(1, 20))).tolist()
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 7)),
            temperature=float(rng.integers(2)),
            seed=int(rng.integers(2**30)),
            ignore_eos=True,
        )
        made.append(engine.submit(prompt, params))
    return made


@pytest.mark.wide
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell memory this way")
def test_thousands_of_requests_leave_nothing(no_type_checks):
    config = with_windows(TINY, None)
    engine = TinyEngine(
        random_target(config, 0),
        random_head(config, 1),
        TreeSettings(4, 2),
        slots=SLOTS,
        capacity=128,
        num_pages=PAGES,
        chunks=((1, 128), (8, 32)),
    )
    rng = np.random.default_rng(0)
    begins = [rng.integers(0, 64, 70).tolist() for _ in range(8)]
    done = cancelled = hits = 0
    settled = None
    while done < COUNT:
        requests = submit_some(engine, rng, begins, 100)
        doomed = [request for request in requests if rng.random() < 0.38]
        while engine.busy:
            engine.launch(int(rng.integers(1, 5)))
            # Some while they wait, some while they decode, some never, as they have ended.
            for request in doomed[:8]:
                cancelled += request.open
                request.cancel()
            del doomed[:8]
            engine.collect()
        done += len(requests)
        hits += sum(request.prefix_tokens > 0 for request in requests)
        del requests, doomed
        finish(engine)
        engine.step()  # frees the last slots
        check_pool(engine.scheduler.pool, [])
        assert engine.scheduler.pool.num_free == PAGES
        if done == SETTLED:
            settled = objects_and_bytes()
    objects, memory = objects_and_bytes()
    assert cancelled >= 0.3 * COUNT
    assert hits >= 0.05 * COUNT
    assert engine.scheduler.requests == []
    assert objects - settled[0] < MOST_OBJECTS
    assert memory - settled[1] < MOST_GROWTH
