"""Targets with windows and recurrent layers whose requests begin behind snapshots, on a device and on two."""

import asyncio
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import AsyncLLM, SamplingParams, generate
from jetspec_jax.decode.settings import PLAIN, TreeSettings
from jetspec_jax.decode.snapshots import keep, restore
from jetspec_jax.device.memory import DeviceMemoryError
from jetspec_jax.engine import plan as memory
from jetspec_jax.engine.plan import check_engine_memory, plan_engine
from jetspec_jax.progress import log_once
from tests.decode.compilations import compilations
from tests.decode.tiny import (
    HYBRID,
    TINY,
    TinyEngine,
    check_snapshots,
    finish,
    random_head,
    random_target,
    with_windows,
)
from tests.engine.test_figures import whole
from tests.marks import wide
from tests.mesh.tiny import on_mesh
from tests.meshes import mesh_of

# A ring has three pages: what lies in each of them shows.
WINDOWS = with_windows(TINY, 100, None)
MODELS = {
    "windows": WINDOWS,
    "recurrent": HYBRID,
    "both": dataclasses.replace(HYBRID, layers=(WINDOWS.layers[0], *HYBRID.layers)),
}
SLOTS, PLACES = 2, 3


def engine_of(model, mesh=None, *, trees=True, snapshots=PLACES, **settings):
    config = dataclasses.replace(MODELS[model], max_position_embeddings=384)
    target, head = random_target(config, 0), random_head(config, 1)
    if mesh is not None:
        target, head = on_mesh((target, head), mesh)
    models = (target, head, TreeSettings(16, 2)) if trees else (target, None, PLAIN)
    return TinyEngine(*models, slots=SLOTS, capacity=384, snapshots=snapshots, mesh=mesh, **settings)


def waves(rng):
    """Requests that come together, and tokens that each finds when it comes; 64 tokens make a page."""
    base = rng.integers(0, 64, 200).tolist()

    def own(shared, count):
        return base[:shared] + rng.integers(0, 64, count).tolist()

    return [
        # It leaves a snapshot after 192 tokens.
        [(base, 0)],
        # Behind all of it, with nothing left to prefill; and behind less than there is a snapshot of: this
        # one leaves another after 128, where it parts from the first.
        [(base[:193], 192), (own(140, 60), 0)],
        [(own(128, 30), 128), (own(195, 4), 192)],
        # The same text twice: the second waits until the first has left its snapshot.
        [(short := rng.integers(0, 64, 130).tolist(), 0), (short, 128)],
    ]


def serve_waves(engine, asked):
    served = []
    for wave in asked:
        params = [
            SamplingParams(max_tokens=16, temperature=float(seed % 2), seed=seed, ignore_eos=True)
            for seed, _ in enumerate(wave, len(served))
        ]
        requests = [engine.submit(prompt, own) for (prompt, _), own in zip(wave, params, strict=True)]
        finish(engine)
        served += requests
    return served


@pytest.mark.wide
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("both", None),
        wide("windows", None),
        wide("recurrent", None),
        wide("both", (1, 2)),
    ],
)
def test_hits_change_nothing(model, mesh):
    asked = waves(np.random.default_rng(3))
    hits = [tokens for wave in asked for _, tokens in wave]
    alone = serve_waves(engine_of(model, trees=False, snapshots=0), [[own] for wave in asked for own in wave])
    mesh = None if mesh is None else mesh_of(*mesh)
    without = serve_waves(engine_of(model, mesh, snapshots=0), asked)
    engine = engine_of(model, mesh)
    # Nothing may depend on what a place held before.
    engine.runner.snapshots = jax.tree.map(
        lambda x: x + jnp.asarray(jnp.nan, x.dtype), engine.runner.snapshots
    )
    served = serve_waves(engine, asked)
    assert [own.prefix_tokens for own in served] == hits
    assert [own.prefix_tokens for own in [*alone, *without]] == [0] * 2 * len(hits)
    assert [own.tokens for own in served] == [own.tokens for own in without] == [own.tokens for own in alone]
    for request, other in zip(served, without, strict=True):
        assert request.accept_lengths == other.accept_lengths
        assert request.tree_sizes == other.tree_sizes
    # All places are in use, and are taken again; every program is there.
    with compilations() as seen:
        again = serve_waves(engine, waves(np.random.default_rng(4)))
    assert seen == []
    assert [own.prefix_tokens for own in again] == hits
    check_snapshots(engine.scheduler._allocator.snapshots)


def filled(tree, rng):
    """The same arrays, where they are, with other numbers."""
    return jax.tree.map(lambda x: jax.device_put(rng.standard_normal(x.shape, np.float32), x.sharding), tree)


def places_of(store, count):
    """What each of so many slots has in a store: ``[slots, ...]``."""
    return [np.asarray(own).reshape(count, -1) for own in jax.tree.leaves(store)]


@pytest.mark.parametrize("mesh", [None, (1, 2)], ids=str)
def test_a_copy_takes_one_slot_and_nothing_else(mesh):
    mesh, rng = None if mesh is None else mesh_of(*mesh), np.random.default_rng(0)
    runner = engine_of("both", mesh, trees=False).runner
    models = runner.decoder.models
    state = dataclasses.replace(runner.state, stores=filled(runner.state.stores, rng))
    snapshots = filled(runner.snapshots, rng)
    with_places = models.target.layers_with_places
    assert with_places == (0, 2, 3)
    before = jax.tree.map(np.asarray, (state.stores, snapshots))
    shardings = jax.tree.map(lambda x: x.sharding, (state.stores, snapshots))
    snapshots = keep(models, state, snapshots, np.int32(1), np.int32(2))
    state = restore(models, state, snapshots, np.int32(0), np.int32(2))
    assert jax.tree.map(lambda x: x.sharding, (state.stores, snapshots)) == shardings
    stores, kept = before
    for layer, place in zip(with_places, range(3), strict=True):
        old, new = places_of(stores[layer], SLOTS), places_of(state.stores[layer], SLOTS)
        was, now = places_of(kept[place], PLACES), places_of(snapshots[place], PLACES)
        for array in range(len(old)):
            np.testing.assert_array_equal(now[array], [*was[array][:2], old[array][1]])
            np.testing.assert_array_equal(new[array], old[array][[1, 1]])
    jax.tree.map(np.testing.assert_array_equal, state.stores[1], stores[1])


@pytest.mark.parametrize("mesh", [None, (1, 2)], ids=str)
def test_snapshots_are_counted(monkeypatch, mesh):
    mesh = None if mesh is None else mesh_of(*mesh)
    engine = engine_of("both", mesh)
    plan, arrays = engine.plan, jax.tree.leaves(engine.runner.snapshots)
    devices = jax.devices()[: 1 if mesh is None else 2]
    held = {
        sum(shard.data.nbytes for own in arrays for shard in own.addressable_shards if shard.device == device)
        for device in devices
    }
    assert len(held) == 1
    monkeypatch.setattr(memory, "check_memory", lambda needs, **_: found.append(needs()))
    found = []
    check_engine_memory(plan)
    check_engine_memory(dataclasses.replace(plan, size=plan.size.with_snapshots(0)))
    [line] = found[0].keys() - found[1].keys()
    assert line == "3 snapshots of windows and states"
    assert found[0].pop(line) == held.pop()
    assert found[0] == found[1]


def test_an_engine_whose_snapshots_do_not_fit_is_refused(monkeypatch):
    plan = engine_of("recurrent", trees=False).plan
    parts = []
    monkeypatch.setattr(memory, "check_memory", lambda needs, **_: parts.append(needs()))
    check_engine_memory(plan)
    monkeypatch.undo()
    monkeypatch.setattr("jetspec_jax.device.memory.free_bytes", lambda mesh=None: sum(parts[0].values()) - 1)
    with pytest.raises(DeviceMemoryError, match="3 snapshots of windows and states") as info:
        check_engine_memory(plan)
    assert "max_slots 1" in str(info.value)


def test_an_engine_has_as_many_as_slots_unless_it_is_told():
    counts = [
        plan_engine(HYBRID, None, PLAIN, jnp.dtype("float32"), slots=SLOTS, snapshots=given).size.snapshots
        for given in (None, 7, 0)
    ]
    assert counts == [SLOTS, 7, 0]


@pytest.mark.wide
def test_async_llm_keeps_snapshots(monkeypatch):
    config = dataclasses.replace(HYBRID, max_position_embeddings=256)
    prompt = np.random.default_rng(0).integers(0, 64, 150).tolist()
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=0, ignore_eos=True)

    async def both():
        async with AsyncLLM(target=random_target(config, 0), max_slots=1) as llm:
            return [await whole(llm, prompt, params) for _ in range(2)]

    first, second = asyncio.run(both())
    assert [own.metrics.prefix_tokens for own in (first, second)] == [0, 128]
    assert first.token_ids == second.token_ids
    assert first.token_ids == generate(random_target(config, 0), [prompt], params)[0].token_ids


def test_who_shares_nothing_is_told_once(caplog):
    log_once.cache_clear()
    with caplog.at_level("INFO", "jetspec_jax"):
        engine_of("recurrent", trees=False)
        assert not [text for text in caplog.messages if "beginnings" in text]
        for _ in range(2):
            engine_of("recurrent", trees=False, snapshots=0)
    [message] = [text for text in caplog.messages if "beginnings" in text]
    assert "keeps no snapshots of them, so requests share no beginnings" in message
