"""After every dispatch all devices agree on what steers decoding, even where their sums differ."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jetspec_jax import SamplingParams, generate
from jetspec_jax.cache.paged import PagedStore
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.engine.plan import empty_state
from jetspec_jax.inspect.agreement import steering, unequal
from pallas_kernels import shards
from tests.decode.tiny import SLIDING, TinyEngine, random_head, random_target
from tests.mesh.tiny import on_mesh
from tests.meshes import mesh_of

# Two KV heads, on four devices.
CONFIG = dataclasses.replace(SLIDING, vocab_size=67)
PARTS = 4
SETTINGS = TreeSettings(budget=16, width=3)
FILTERED = {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
# The second is longer than a chunk of prefill, and both than a window.
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], np.random.default_rng(0).integers(0, 67, 140).tolist()]
PARAMS = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, seed=7, **FILTERED),
]


def make_engine(config):
    mesh = mesh_of(1, PARTS)
    target, head = on_mesh((random_target(config, 0), random_head(config, 0)), mesh)
    return TinyEngine(target, head, SETTINGS, slots=2, capacity=256, mesh=mesh)


@pytest.fixture(scope="module")
def engine():
    return make_engine(CONFIG)


def run(engine, prompts=PROMPTS, params=PARAMS):
    """Their tokens; after every dispatch of a round or two all devices must agree."""
    requests = [engine.submit(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
    dispatches = 0
    while engine.busy:
        engine.launch(2)
        agree(engine)
        engine.collect()
        dispatches += 1
        assert dispatches < 100
    assert dispatches > 3
    return [request.tokens for request in requests]


def agree(engine):
    """What steers decoding is whole on every device, with the same bits on all of them."""
    arrays = steering(engine.runner)
    assert unequal(arrays) == []
    leaves = jax.tree.leaves(arrays)
    assert len(leaves) > 16
    assert {len(array.addressable_shards) for array in leaves} == {PARTS}


@pytest.mark.parametrize("other", [-0.0, np.nan, 1.0])
def test_one_bit_on_one_device(other):
    mesh = mesh_of(1, PARTS)
    values = [np.zeros(3, np.float32) for _ in range(PARTS)]
    values[2][1] = other

    def spread(values):
        parts = [jax.device_put(own, device) for own, device in zip(values, mesh.devices.flat, strict=True)]
        return jax.make_array_from_single_device_arrays((3,), NamedSharding(mesh, PartitionSpec()), parts)

    same = spread(values[:1] * PARTS)
    split = jax.device_put(np.zeros(8), NamedSharding(mesh, PartitionSpec(shards.TENSOR)))
    tree = {"tokens": same, "lengths": [same, spread(values)], "tree": split}
    assert unequal(tree) == ["['lengths'][1]", "['tree']"]


@pytest.mark.wide
def test_after_every_dispatch(engine):
    """And the tokens are those of one device, where each request is alone and no tree is drafted."""
    target = random_target(CONFIG, 0)
    alone = [generate(target, [prompt], own)[0] for prompt, own in zip(PROMPTS, PARAMS, strict=True)]
    assert run(engine) == [completion.token_ids for completion in alone]


def test_slots_change_hands_where_they_lie(engine):
    def shardings(state):
        return jax.tree.map(lambda array: array.sharding, state)

    decoder, state = engine.plan.decoder, empty_state(engine.plan)
    lies = shardings(state)
    pages, settings = jax.tree.map(
        lambda array: np.asarray(array)[0], (state.slots.block_tables, state.settings)
    )
    begins = np.int32(5), np.int32(0), np.bool_(True)
    state = decoder.insert(state, np.int32(1), pages, settings, *begins)
    assert shardings(state) == lies
    state = decoder.release(state, np.int32(1))
    assert shardings(state) == lies


@pytest.mark.wide
def test_where_sums_differ_by_a_bit(monkeypatch):
    """One device rounds every sum its own way, and still ends when the others do, with their tokens."""
    total = shards.all_sum

    def perturbed(x):
        summed = total(x)
        return jnp.where(shards.index() == 1, jnp.nextafter(summed, jnp.inf), summed)

    monkeypatch.setattr(shards, "all_sum", perturbed)
    # A config of its own, so that no other test's programs run here, nor these elsewhere.
    engine = make_engine(dataclasses.replace(CONFIG, max_position_embeddings=257))
    tokens = run(engine)
    assert [len(own) for own in tokens] == [24, 24]
    # Devices 0 and 1 have the same KV head, and 2 and 3 another.
    store = engine.runner.state.stores[1]
    assert isinstance(store, PagedStore)
    keys = [np.asarray(shard.data) for shard in store.k.addressable_shards]
    assert (keys[0] != keys[1]).any()
    assert (keys[2] == keys[3]).all()
