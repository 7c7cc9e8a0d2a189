"""Stores of recurrent layers: a slot's state follows its own committed tokens, and nothing else does."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.paged import PagedStore
from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.cache.recurrent import RecurrentStore, empty_recurrent_store
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import chain_path, commit, empty_stores
from jetspec_jax.config import Recurrence
from jetspec_jax.device.memory import array_bytes
from jetspec_jax.models.layers import KV, RecurrentRows
from pallas_kernels.gated_delta import gated_delta
from tests.decode.tiny import TINY

SIZES = Recurrence(num_key_heads=2, num_value_heads=6, key_dim=8, value_dim=5, kernel=4)
SLOTS, ROWS = 3, 6
BFLOAT16 = jnp.dtype(jnp.bfloat16)
TREE = [-1, 0, 0, 1, 2, 4]


def slots_of(lengths, numbers=None):
    numbers = range(len(lengths)) if numbers is None else numbers
    tables = jnp.full((len(lengths), 1), NO_PAGE, jnp.int32)
    return Slots(tables, *(jnp.asarray(x, jnp.int32) for x in (lengths, list(numbers))))


def random_store(seed=0, slots=SLOTS):
    rng = np.random.default_rng(seed)
    empty = empty_recurrent_store(slots, SIZES, BFLOAT16)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), empty)


def garbage(store):
    return jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), store)


def tokens_of(seed, rows=ROWS, batch=SLOTS):
    """What a layer makes of a block before it asks its store."""
    rng = np.random.default_rng(seed)
    keys = batch, rows, SIZES.num_key_heads, SIZES.key_dim
    values = batch, rows, SIZES.num_value_heads, SIZES.value_dim
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.standard_normal((2, *keys)))
    v, decay = rng.standard_normal(values), -rng.random(values[:3])
    beta, before = rng.random(values[:3]), rng.standard_normal((batch, rows, SIZES.channels))
    return jnp.asarray(before, BFLOAT16), *(jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, beta))


def block_of(batch=SLOTS, rows=ROWS, parents=None):
    block = Block.chain(jnp.zeros((batch, rows), jnp.int32))
    if parents is None:
        return block
    return replace(block, parents=jnp.asarray([parents] * batch, jnp.int32), kind="tree")


@jax.jit
def run(store, slots, block, tokens, path, count):
    """A layer over a block and the commit of a path: what it read, and the store."""
    before, q, k, v, decay, beta = tokens
    own = store.pick(slots.numbers)
    history = attend_over([own], slots, block).history(0)
    read = gated_delta(q, k, v, decay, beta, history.state, parents=history.parents)
    stash = RecurrentRows(before, k, read.delta, decay)
    [own] = commit([own], slots, [stash], path, count)
    return (history, read), store.put(slots.numbers, own)


def whole(batch, count, rows=ROWS):
    return chain_path(batch, rows), jnp.asarray(count, jnp.int32)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def part(tree, index):
    return jax.tree.map(lambda x: x[jnp.asarray(index)], tree)


def test_a_slot_without_tokens_starts_from_zero_whatever_lies_there():
    """A reused slot equals a fresh one bit for bit: what it reads, and what is kept."""
    slots, tokens = slots_of([0, 0, 0]), tokens_of(1)
    for parents, path in [(None, chain_path(SLOTS, ROWS)), (TREE, jnp.asarray([[0, 2, 4]] * SLOTS))]:
        count = jnp.asarray([1, 3, 2], jnp.int32)
        settings = slots, block_of(parents=parents), tokens, path.astype(jnp.int32), count
        fresh = run(empty_recurrent_store(SLOTS, SIZES, BFLOAT16), *settings)
        assert bits(run(garbage(random_store()), *settings)) == bits(fresh)
        assert bits(run(random_store(5), *settings)) == bits(fresh)
        (history, _), _ = fresh
        assert not any(np.asarray(x, np.float32).any() for x in history[:2])
    alone = slots_of([0], [1])
    view = garbage(random_store()).pick(alone.numbers).view(alone, block_of(1))
    assert not any(np.asarray(x, np.float32).any() for x in view)


@pytest.mark.parametrize("numbers", [range(SLOTS), [2, 0], [1]])
def test_a_count_of_0_keeps_every_bit(numbers):
    """Of a slot that decodes, and of one that is free, of which nothing can be said."""
    store = random_store()
    store = replace(store, state=store.state.at[:, 0, 0, 0].set(-0.0).at[2, 1].set(jnp.nan))
    batch = len(numbers)
    slots = slots_of([7, 3, 0][:batch], numbers)
    path = jnp.full((batch, 4), -1, jnp.int32)
    count = jnp.zeros(batch, jnp.int32)
    _, after = run(store, slots, block_of(batch), tokens_of(2, batch=batch), path, count)
    assert bits(after) == bits(store)


@pytest.mark.parametrize("numbers", [[1], [2, 0]])
def test_other_slots_keep_every_bit(numbers):
    """The prefill of one slot, and of several in any order, is what a round of all would do to them."""
    batch, store, lengths = len(numbers), random_store(), [4, 0, 9]
    slots, tokens = slots_of(lengths), tokens_of(3)
    given = [2, 5, 6]
    (_, expected), all_of_them = run(store, slots, block_of(), tokens, *whole(SLOTS, given))
    own = part(slots, numbers)
    counts = whole(batch, [given[n] for n in numbers])
    (_, read), after = run(store, own, block_of(batch), part(tokens, numbers), *counts)
    np.testing.assert_allclose(read.out, part(expected, numbers).out, atol=1e-6)
    np.testing.assert_allclose(part(after, numbers).state, part(all_of_them, numbers).state, atol=1e-6)
    np.testing.assert_array_equal(part(after, numbers).rows, part(all_of_them, numbers).rows)
    others = [n for n in range(SLOTS) if n not in numbers]
    assert bits(part(after, others)) == bits(part(store, others))


def test_the_last_rows():
    """Rows of a path after the old ones, of every count, and of paths that skip nodes."""
    store = random_store()
    tokens, path = tokens_of(4), [[0, 2, 4, 5, -1], [0, 1, 3, 9, -7], [3, 2, 1, 0, 5]]
    new, old = np.asarray(tokens[0], np.float32), np.asarray(store.rows, np.float32)
    for count in ([0, 1, 2], [3, 2, 5], [4, 3, 0]):
        settings = block_of(parents=TREE), tokens, jnp.asarray(path, jnp.int32)
        _, after = run(store, slots_of([9, 5, 3]), *settings, jnp.asarray(count, jnp.int32))
        for b in range(SLOTS):
            rows = np.concatenate([old[b], new[b, path[b][: count[b]]]])[-3:]
            np.testing.assert_array_equal(np.asarray(after.rows[b], np.float32), rows)


def test_rows_before_a_sequence_s_start_are_zero():
    tokens = tokens_of(5)
    _, after = run(garbage(random_store()), slots_of([0, 0, 0]), block_of(), tokens, *whole(SLOTS, [1, 2, 3]))
    for b, zeros in enumerate([2, 1, 0]):
        assert not np.asarray(after.rows[b, :zeros], np.float32).any()
        np.testing.assert_array_equal(after.rows[b, zeros:], tokens[0][b, : 3 - zeros])


@pytest.mark.parametrize("steps", [[1] * 6, [2, 4]])
def test_tokens_may_come_in_parts(steps):
    tokens, store = tokens_of(6), garbage(random_store())
    (_, expected), end = run(store, slots_of([0] * SLOTS), block_of(), tokens, *whole(SLOTS, [ROWS] * SLOTS))
    done, out = 0, []
    for rows in steps:
        chunk = jax.tree.map(lambda x, a=done, b=done + rows: x[:, a:b], tokens)
        settings = slots_of([done] * SLOTS), block_of(rows=rows), chunk
        (_, read), store = run(store, *settings, *whole(SLOTS, [rows] * SLOTS, rows))
        out.append(read.out)
        done += rows
    np.testing.assert_allclose(jnp.concatenate(out, axis=1), expected.out, atol=2e-6)
    np.testing.assert_allclose(store.state, end.state, atol=2e-6)
    np.testing.assert_array_equal(store.rows, end.rows)


def test_a_path_of_a_tree_is_the_chain_of_its_nodes():
    path, tokens, store = [0, 2, 4, 5], tokens_of(7), random_store()
    along = jax.tree.map(lambda x: x[:, jnp.asarray(path)], tokens)
    slots = slots_of([0, 3, 20])
    count = jnp.asarray([4, 4, 2], jnp.int32)
    settings = block_of(parents=TREE), tokens, jnp.asarray([path] * SLOTS, jnp.int32)
    (_, of_tree), one = run(store, slots, *settings, count)
    (_, of_chain), two = run(store, slots, block_of(rows=4), along, chain_path(SLOTS, 4), count)
    np.testing.assert_allclose(of_tree.out[:, jnp.asarray(path)], of_chain.out, atol=2e-6)
    np.testing.assert_allclose(one.state, two.state, atol=2e-6)
    np.testing.assert_array_equal(one.rows, two.rows)


def test_stores_of_a_model_are_committed_together():
    """Recurrent layers of one size or another beside one with pages: each gets its own rows."""
    other = replace(SIZES, value_dim=7)
    layer = replace(TINY.layers[0], num_heads=0, num_kv_heads=0, head_dim=0)
    layers = (replace(layer, recurrence=SIZES), TINY.layers[0], *[replace(layer, recurrence=other)] * 2)
    config = replace(TINY, layers=layers)
    slots = Slots.of(jnp.asarray([[1], [0]], jnp.int32), jnp.asarray([0, 2], jnp.int32))
    stores = empty_stores(config, 2, 4, BFLOAT16, slots)
    assert [type(store) for store in stores] == [RecurrentStore, PagedStore, RecurrentStore, RecurrentStore]
    assert stores[2].layout == stores[3].layout != stores[0].layout
    rng, stash = np.random.default_rng(0), []
    for i, store in enumerate(stores):
        if isinstance(store, PagedStore):
            kv = rng.standard_normal((2, 2, 3, *store.k.shape[2:]))
            stash.append(KV(*jnp.asarray(kv, BFLOAT16)))
            continue
        _, _, k, _, decay, _ = tokens_of(i, rows=3, batch=2)
        delta = rng.standard_normal((2, 3, *store.state.shape[1::2]))
        rows = rng.standard_normal((2, 3, store.rows.shape[2]))
        stash.append(RecurrentRows(jnp.asarray(rows, BFLOAT16), k, jnp.asarray(delta, jnp.float32), decay))
    path, count = jnp.asarray([[0, 2], [1, -1]], jnp.int32), jnp.asarray([2, 1], jnp.int32)
    written = jax.jit(commit)(stores, slots, stash, path, count)
    for store, own, after in zip(stores, stash, written, strict=True):
        [alone] = jax.jit(lambda store, own: commit([store], slots, [own], path, count))(store, own)
        assert bits(alone) == bits(after)
    assert bits(written[2]) != bits(written[3])
    with pytest.raises(ValueError, match="a recurrent layer keeps a state for each slot"):
        empty_stores(config, 2, 4, BFLOAT16)


def test_bytes():
    """Of Qwen3.6-35B-A3B's 30 recurrent layers: 61.4 MiB for a slot."""
    sizes = Recurrence(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, kernel=4)
    store = jax.eval_shape(partial(empty_recurrent_store, 2, sizes, BFLOAT16))
    assert (store.rows.dtype, store.state.dtype) == (jnp.bfloat16, jnp.float32)
    assert array_bytes(store) == 2 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)
    assert round(30 * array_bytes(store) / 2 / 2**20, 1) == 61.4


def test_what_a_layer_is_told():
    store, slots = random_store(), slots_of([2, 0, 5])
    for parents in (None, TREE):
        block = block_of(parents=parents)
        history = attend_over([store], slots, block).history(0)
        assert history.parents is (None if parents is None else block.parents)
        np.testing.assert_array_equal(history.state[2], store.state[2])
        alone = attend_over(None, None, block).history(0)
        assert (alone.rows, alone.state, alone.parents) == (None, None, history.parents)
    full = Block.chain(jnp.zeros((SLOTS, ROWS), jnp.int32), "full")
    with pytest.raises(ValueError, match="needs a chain or a tree"):
        attend_over([store], slots, full).history(0)
