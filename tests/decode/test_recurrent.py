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
from tests.decode.oracle import OracleProposer, plant
from tests.decode.tiny import HYBRID, TinyEngine, random_head, random_target, serve
from tests.decode.waves import serve_waves, with_nan
from tests.marks import wide

FLOAT32 = jnp.dtype(jnp.float32)
PAGE, LIMIT = 64, 512
CONFIG = dataclasses.replace(HYBRID, max_position_embeddings=LIMIT)
ORACLE = OracleProposer(CONFIG.vocab_size)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 7)


def test_a_prompt_in_chunks_of_any_size():
    """The states and the next token are those of the whole prompt at once."""
    attention, recurrent, _ = CONFIG.layers
    config = dataclasses.replace(CONFIG, layers=(recurrent, attention, recurrent))
    target = random_target(config, 7)
    tokens = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, 200)).astype(np.int32)
    tables = jnp.arange(4, dtype=jnp.int32)[None]

    @jax.jit
    def step(stores, slots, tokens, count):
        model, block = bind(config, target.weights), Block.chain(tokens, num_nodes=count)
        output = model(block.tokens, block.positions(slots.lengths), attend_over(stores, slots, block))
        last = jnp.take_along_axis(output.hidden, count[:, None, None] - 1, axis=1)
        stores = commit(stores, slots, output.stash, chain_path(*tokens.shape), count)
        return stores, slots._replace(lengths=slots.lengths + count), model.logits(last)

    found = []
    for size in (200, 128, 7, 1):
        slots = Slots.of(tables, jnp.zeros(1, jnp.int32))
        stores = with_nan(empty_stores(config, 4, PAGE, FLOAT32, slots))
        for start in range(0, 200, size):
            count = min(size, 200 - start)
            chunk = np.resize(tokens[:, start : start + count], (1, size))
            stores, slots, rows = step(stores, slots, chunk, jnp.full(1, count, jnp.int32))
        kept = [store for store in stores if isinstance(store, RecurrentStore)]
        found.append((jax.tree.map(np.asarray, kept), int(rows.argmax())))
    (whole, token), *others = found
    assert len(whole) == 2
    for kept, next_token in others:
        assert next_token == token
        # The last layer's inputs come from attention, which rounds chunks of another size in another way.
        for ours, expected, tolerance in zip(kept, whole, (1e-5, 5e-5), strict=True):
            np.testing.assert_allclose(ours.state, expected.state, atol=tolerance)
            np.testing.assert_allclose(ours.rows, expected.rows, atol=tolerance)


@pytest.mark.parametrize(
    ("waves", "new"),
    [((1, 3), (15, 35)), wide((1, 4, 2, 3), (200, 201))],
    ids=["two waves", "four waves of 200 tokens"],
)
def test_trees_and_reused_slots_are_lossless(target, waves, new):
    """Batches of 1 to 4 in the slots of those before them, deep paths, and no compilation after the first."""
    made = TinyEngine(
        target,
        None,
        TreeSettings(budget=16, width=2),
        slots=4,
        capacity=LIMIT,
        proposer=ORACLE,
        proposer_weights=plant([[]] * 4, LIMIT),
    )
    runner = made.runner
    runner.state = dataclasses.replace(runner.state, stores=with_nan(runner.state.stores))
    lengths = serve_waves(made, ORACLE, waves, np.random.default_rng(3), limit=LIMIT, new=new)
    assert np.mean(lengths) > 3


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
