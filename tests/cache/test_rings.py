"""Rings: stores of layers with a window keep the last pages of each slot, and nothing else changes."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache.block import Block
from jetspec_jax.cache.paged import PagedStore
from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.cache.ring import RingStore, ring_pages
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import chain_path, commit, empty_stores
from jetspec_jax.decode.settings import PLAIN, make_decoder
from jetspec_jax.device.memory import array_bytes
from jetspec_jax.engine.plan import EnginePlan, empty_state
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.models.layers import KV
from pallas_kernels.tree_attention import pallas_triton, reference
from tests.decode.tiny import TINY, with_windows

FLOAT32 = jnp.dtype(jnp.float32)
PAGE = 4


def slots_of(tables, lengths):
    return Slots.of(jnp.asarray(tables, jnp.int32), jnp.asarray(lengths, jnp.int32))


@pytest.mark.parametrize("page", [1, 2, 4, 7])
def test_a_ring_has_the_pages_that_a_window_touches(page):
    for window in range(1, 30):
        seen = [{s // page for s in range(end - window + 1, end)} for end in range(window, window + page)]
        assert ring_pages(window, page) == max(1, *map(len, seen))


def test_the_drawn_rings():
    slots = slots_of([[NO_PAGE]] * 3, [9, 0, 0])
    store = RingStore(*(jnp.full((9, 2, 1, 1), -1.0) for _ in "kv"), ring=3)
    logical = jnp.arange(7, dtype=jnp.int32)[None]
    of_slot_2 = jax.tree.map(lambda x: x[2:], slots)
    assert store.pages_of(of_slot_2, logical).tolist() == [[6, 7, 8, 6, 7, 8, 6]]
    view = store.view(slots, Block.chain(jnp.zeros((3, 1), jnp.int32)))
    assert view.block_tables.tolist() == [[2, 0, 1], [3, 4, 5], [6, 7, 8]]
    assert view.lengths.tolist() == [5, 0, 0]
    # Nine tokens one by one, each a row that holds its position.
    write = jax.jit(commit)
    for position in range(9):
        row = jnp.full((3, 1, 1, 1), position, jnp.float32)
        before = slots._replace(lengths=jnp.asarray([position, 0, 0], jnp.int32))
        [store] = write((store,), before, (KV(row, row),), chain_path(3, 1), jnp.asarray([1, 0, 0]))
    assert store.k[:3, :, 0, 0].tolist() == [[6, 7], [8, 3], [4, 5]]
    assert (store.k[3:] == -1).all()


def test_the_kernel_reads_rings():
    """The GPU's kernel over rings, NaN where no seen token lies, gives what the reference gives over all."""
    rng = np.random.default_rng(1)
    page, window, batch, rows, pages = 16, 40, 4, 5, 9
    ring = ring_pages(window, page)
    slots = slots_of(rng.permutation(batch * pages).reshape(batch, pages), [0, 47, 64, 100])
    kv = rng.standard_normal((2, batch, pages * page, 1, 16), np.float32)
    whole = np.full((2, batch * pages, page, 1, 16), np.nan, np.float32)
    rings = np.full((2, batch * ring, page, 1, 16), np.nan, np.float32)
    for b, length in enumerate(slots.lengths.tolist()):
        for s in range(length):
            whole[:, slots.block_tables[b, s // page], s % page] = kv[:, b, s]
            if s >= length - window + 1:
                rings[:, b * ring + s // page % ring, s % page] = kv[:, b, s]
    block = Block.chain(jnp.zeros((batch, rows), jnp.int32))
    q, k, v = rng.standard_normal((3, batch, rows, 1, 16), np.float32)
    inputs = jnp.asarray(np.repeat(q, 2, axis=2)), jnp.asarray(k), jnp.asarray(v), block.mask()
    settings = {"scale": 0.25, "window": window, "depths": block.depths, "sinks": None}

    over_all = PagedStore(*map(jnp.asarray, whole)).view(slots, block)
    over_rings = RingStore(*map(jnp.asarray, rings), ring=ring).view(slots, block)
    expected = jax.jit(partial(reference.tree_attention, **settings))(*inputs, over_all)
    kernel = jax.jit(partial(pallas_triton.tree_attention, interpret=True, **settings))
    got = kernel(*inputs, over_rings)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_array_less(0.01, np.abs(expected).max(axis=(1, 2, 3)))


def test_stores_without_slots_have_no_rings():
    slots = slots_of([[NO_PAGE] * 5] * 2, [0, 0])
    config = with_windows(TINY, 1, PAGE, 11, None, 500)
    stores = empty_stores(config, 9, PAGE, FLOAT32, slots)
    assert [store.k.shape[:2] for store in stores] == [(pages, PAGE) for pages in (2, 4, 8, 9, 10)]
    assert [type(store) for store in stores] == [*[RingStore] * 3, PagedStore, RingStore]
    assert {type(store) for store in empty_stores(config, 9, PAGE, FLOAT32)} == {PagedStore}


def test_only_full_layers_grow_with_the_capacity():
    config = dataclasses.replace(with_windows(TINY, 128, None, 1, 300), max_position_embeddings=1 << 17)
    decoder = make_decoder(config, None, PLAIN)
    row = config.layers[0].kv_size * 4

    def bytes_of(capacity):
        plan = EnginePlan(decoder, EngineSize.of(config, 3, capacity), FLOAT32)
        state = jax.eval_shape(lambda: empty_state(plan))
        return list(map(array_bytes, state.stores))

    # A window of 128 looks back at 127 tokens in at most 3 pages of 64.
    rings = [3 * pages * 64 * row for pages in (3, 1, 6)]
    for capacity in (1024, 1 << 17):
        assert bytes_of(capacity) == [rings[0], 3 * capacity * row, *rings[1:]]
    # A slot of 2 pages has no use for more.
    assert bytes_of(128) == [3 * pages * 64 * row for pages in (2, 2, 1, 2)]
