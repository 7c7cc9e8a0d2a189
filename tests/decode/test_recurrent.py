"""Models with recurrent layers decode without loss, whatever their slots held before."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import SamplingParams
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.recurrent import RecurrentStore
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import chain_path, commit, empty_stores
from jetspec_jax.decode.settings import TreeSettings
from jetspec_jax.models import bind
from tests.decode.tiny import HYBRID, TinyEngine, random_head, random_target, serve, with_nan
from tests.families.goldens import LONG_IDS, LONG_PLACES, golden_target, long_in_float64
from tests.float64 import Reference, assert_rounded

FLOAT32 = jnp.dtype(jnp.float32)
PAGE, LIMIT = 64, 512
CONFIG = dataclasses.replace(HYBRID, max_position_embeddings=LIMIT)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 7)


@pytest.mark.parametrize("size", [128, 7, 1])
def test_a_prompt_in_chunks_of_any_size(size):
    """Logits are float64's all along the prompt, so that its states are, too; and stores held NaN before."""
    golden, length = golden_target("qwen3_5"), 200
    tables = jnp.arange(4, dtype=jnp.int32)[None]

    @jax.jit
    def step(stores, slots, tokens, count):
        model, block = bind(golden.config, golden.weights), Block.chain(tokens, num_nodes=count)
        output = model(block.tokens, block.positions(slots.lengths), attend_over(stores, slots, block))
        stores = commit(stores, slots, output.stash, chain_path(*tokens.shape), count)
        return stores, slots._replace(lengths=slots.lengths + count), model.logits(output.hidden)

    slots = Slots.of(tables, jnp.zeros(1, jnp.int32))
    stores, found = with_nan(empty_stores(golden.config, 4, PAGE, FLOAT32, slots)), []
    for start in range(0, length, size):
        count = min(size, length - start)
        chunk = np.resize(LONG_IDS[:, start : start + count], (1, size))
        stores, slots, rows = step(stores, slots, chunk, jnp.full(1, count, jnp.int32))
        found.append(np.asarray(rows[:, :count]))
    found = np.concatenate(found, axis=1)[LONG_PLACES]
    expected = long_in_float64("qwen3_5")
    assert found.shape[1] == 13
    assert_rounded(found, Reference(*(of_all[:, :13] for of_all in expected)))


def test_a_slot_begins_anew_and_the_others_keep_their_bits(target):
    """Of two slots one serves, and ends as one that never served before; the other holds what it held."""
    head = random_head(CONFIG, 1)
    prompt, params = list(range(40)), SamplingParams(max_tokens=20)

    def states(engine):
        kept = [store for store in engine.runner.state.stores if isinstance(store, RecurrentStore)]
        return [np.asarray(array) for store in kept for array in (store.rows, store.state)]

    fresh, used = (
        TinyEngine(target, head, TreeSettings(budget=16, width=3), slots=2, capacity=128) for _ in range(2)
    )
    used.runner.state = dataclasses.replace(used.runner.state, stores=with_nan(used.runner.state.stores))
    serve(used, [[5] * 70], [SamplingParams(max_tokens=11)])
    answers = [serve(engine, [prompt], [params])[0].token_ids for engine in (fresh, used)]
    assert answers[0] == answers[1]
    for ours, expected in zip(states(used), states(fresh), strict=True):
        (served,) = np.flatnonzero(~np.isnan(ours).any(axis=tuple(range(1, ours.ndim))))
        (same,) = np.flatnonzero(expected.any(axis=tuple(range(1, ours.ndim))))
        np.testing.assert_array_equal(ours[served], expected[same])
        assert np.isnan(ours[1 - served]).all()
