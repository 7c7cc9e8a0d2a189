"""A runner does what records say: chunks of several prompts, growths, live slots, no rounds at all."""

import jax
import numpy as np
import pytest

from jetspec_jax import SamplingParams, generate
from jetspec_jax.cache.pages import NO_PAGE, PAGE_SIZE
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.batch import Admission, Batch, Growth
from jetspec_jax.engine.size import cut_prompts
from tests.decode.compilations import compilations
from tests.decode.tiny import TINY, TinyEngine, random_head, random_target
from tests.mesh.tiny import on_mesh
from tests.meshes import mesh_of

SLOTS, PAGES, NEW = 4, 3, 14
PROMPTS = [np.random.default_rng(i).integers(0, 64, length).tolist() for i, length in enumerate((61, 1, 125))]
PARAMS = [SamplingParams(max_tokens=NEW, temperature=float(i % 2), seed=i, ignore_eos=True) for i in range(3)]
# Of the pool, in the order in which they are handed out.
POOL = np.random.default_rng(5).permutation(SLOTS * PAGES).tolist()
# Slots of the three requests.
PLACES = (3, 0, 2)
NOBODY = Batch((), (), (), (), (), 1, 0)


@pytest.fixture(scope="module")
def models():
    return random_target(TINY, 0), random_head(TINY, 0)


@pytest.fixture(scope="module", params=[None, (1, 2)], ids=["one device", "two devices"])
def runner(request, models):
    mesh = None if request.param is None else mesh_of(*request.param)
    target, head = models if mesh is None else on_mesh(models, mesh)
    settings = {"slots": SLOTS, "capacity": PAGES * PAGE_SIZE, "mesh": mesh, "chunks": ((2, 32), (1, 64))}
    return TinyEngine(target, head, TreeSettings(8, width=2), **settings).runner


def table(pages):
    return np.array([*pages, *[NO_PAGE] * (PAGES - len(pages))], np.int32)


def begin(pages):
    """Admissions with the pages that each slot has."""
    shape = (), 8, 7
    return tuple(
        Admission(slot, table(pages[slot]), 0, prompt[-1], len(prompt) == 1, params, NEW, *shape)
        for slot, prompt, params in zip(PLACES, PROMPTS, PARAMS, strict=True)
    )


def step(runner, **changes):
    runner.launch(NOBODY._replace(**changes))
    record = runner.collect()
    runner.in_flight.clear()
    return record


def run(runner, rounds):
    """All requests to their ends, two live slots at a time: tokens by slot, and records."""
    free, own = list(POOL), dict(zip(PLACES, PROMPTS, strict=True))
    pages = {slot: [free.pop() for _ in range(-(-len(prompt) // PAGE_SIZE))] for slot, prompt in own.items()}
    left = {slot: np.array(prompt[:-1], np.int32) for slot, prompt in own.items()}
    chunks = tuple(cut_prompts(left, runner.size.chunks, SLOTS))
    record = step(runner, releases=tuple(range(SLOTS)), admissions=begin(pages), chunks=chunks)
    assert record.batch.live == ()
    assert len(record.tokens) == len(record.tree_sizes) == 0
    tokens, records, growths = {slot: [] for slot in own}, [], []
    # Slot 1 idles beside another.
    for live in [(3, 0), (2, 1)] * 12:
        record = step(runner, growths=tuple(growths), live=live, bucket=8, rounds=rounds)
        records.append(record)
        assert record.batch.live == live
        assert record.tokens.shape[1:] == (2, 8)
        for place, slot in enumerate(live):
            found = record.tokens[:, place].reshape(-1).tolist()
            tokens.get(slot, []).extend(token for token in found if token >= 0)
        growths = []
        for slot, prompt in own.items():
            length, room = len(prompt) - 1 + len(tokens[slot]), PAGE_SIZE * len(pages[slot])
            if room < min(length + 8, len(prompt) - 1 + NEW):
                pages[slot].append(free.pop())
                growths.append(Growth(slot, table(pages[slot])))
    return {slot: found[:NEW] for slot, found in tokens.items()}, records


@pytest.mark.wide
def test_requests_that_grow_two_live_slots_at_a_time(runner, models):
    expected = {
        slot: generate(models[0], [prompt], params)[0].token_ids
        for slot, prompt, params in zip(PLACES, PROMPTS, PARAMS, strict=True)
    }
    tokens, records = run(runner, 3)
    assert tokens == expected
    # A dispatch that waits for the compiler is not timed.
    assert records[0].seconds is None
    assert all(record.seconds > 0 for record in records[1:])
    with compilations() as seen:
        again, _ = run(runner, 5)
    assert again == expected
    assert seen == []


def test_a_batch_without_rounds_is_waited_for(runner, monkeypatch):
    waited, get = [], jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda arrays: waited.append(arrays) or get(arrays))
    runner.launch(NOBODY)
    assert not waited
    last = runner.in_flight[0].last
    assert last is not runner.state.active, "the next launch donates it"
    assert runner.collect().tree_sizes.size == 0
    assert any(arrays is last for arrays in waited)
    runner.in_flight.clear()
