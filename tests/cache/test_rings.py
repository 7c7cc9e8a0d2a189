"""Rings: stores of layers with a window keep the last pages of each slot, and nothing else changes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache import stores as cache
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.stores import (
    NO_PAGE,
    Slots,
    Store,
    commit,
    empty_stores,
    pages_in_store,
    readable,
    ring_pages,
)
from jetspec_jax.decode.settings import PLAIN, make_decoder
from jetspec_jax.device.memory import array_bytes
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.models.layers import KV
from pallas_kernels.paged_write import paged_write
from pallas_kernels.tree_attention import PagedPrefix, pallas_triton, reference
from tests.decode.tiny import TINY, with_windows

pytestmark = pytest.mark.usefixtures("quick_compiles")
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
    logical = jnp.arange(7, dtype=jnp.int32)[None]
    of_slot_2 = jax.tree.map(lambda x: x[2:], slots)
    assert pages_in_store(of_slot_2, logical, 3).tolist() == [[6, 7, 8, 6, 7, 8, 6]]
    tables, lengths = readable(slots, 3, 2)
    assert tables.tolist() == [[2, 0, 1], [3, 4, 5], [6, 7, 8]]
    assert lengths.tolist() == [5, 0, 0]
    # Nine tokens one by one, each a row that holds its position.
    store = Store(*(jnp.full((9, 2, 1, 1), -1.0) for _ in "kv"), ring=3)
    write = jax.jit(commit)
    for position in range(9):
        row = jnp.full((3, 1, 1, 1), position, jnp.float32)
        before = slots._replace(lengths=jnp.asarray([position, 0, 0], jnp.int32))
        [store] = write((store,), (KV(row, row),), before, jnp.asarray([1, 0, 0]))
    assert store.k[:3, :, 0, 0].tolist() == [[6, 7], [8, 3], [4, 5]]
    assert (store.k[3:] == -1).all()


RINGS = (1, None, 3, 1, 8)
ROWS, BATCH, PAGES = 21, 3, 8  # of a commit, and PAGES of a slot


def test_commits_of_any_length(monkeypatch):
    """Ring by ring what a loop over tokens writes, also of chains longer than a ring; and all is readable."""

    def each_place_once(pools, blocks, nodes, places, **settings):
        # Of two rows of a launch for one place, either might be the last.
        named = places[places >= 0].tolist()
        assert len(set(named)) == len(named)
        return paged_write(pools, blocks, nodes, places, **settings)

    monkeypatch.setattr(cache, "paged_write", each_place_once)
    rng = np.random.default_rng(0)
    tables = rng.permutation(BATCH * PAGES).reshape(BATCH, PAGES)
    shapes = [(BATCH * (ring or PAGES), PAGE, 1 + i % 2, 2) for i, ring in enumerate(RINGS)]
    stores = tuple(
        Store(*(jnp.full(shape, jnp.nan) for _ in "kv"), ring=ring)
        for ring, shape in zip(RINGS, shapes, strict=True)
    )
    expected = jax.tree.map(np.array, stores)
    length = np.zeros(BATCH, int)
    for counts in ([0, 2, 9], [13, 0, 1], [1, 11, 17], [2, 0, 0], [8, 12, 3]):
        stash = tuple(
            KV(*jnp.asarray(rng.standard_normal((2, BATCH, ROWS, *s[2:]), np.float32))) for s in shapes
        )
        path = np.stack([rng.permutation(ROWS) for _ in range(BATCH)]).astype(np.int32)
        slots = slots_of(tables, length)
        stores = commit(stores, stash, slots, jnp.asarray(counts, jnp.int32), path=jnp.asarray(path))
        for b, r in np.argwhere(np.arange(ROWS)[None, :] < np.array(counts)[:, None]):
            page, place = divmod(int(length[b]) + r, PAGE)
            for store, rows in zip(expected, stash, strict=True):
                where = tables[b, page] if store.ring is None else b * store.ring + page % store.ring
                store.k[where, place], store.v[where, place] = rows.k[b, path[b, r]], rows.v[b, path[b, r]]
        assert jax.tree.structure(stores) == jax.tree.structure(expected)
        jax.tree.map(np.testing.assert_array_equal, stores, expected)
        length += counts
        for store in stores:
            own_tables, own_lengths = readable(slots_of(tables, length), store.ring, PAGE)
            kept = np.asarray(store.k)[np.asarray(own_tables)].reshape(BATCH, -1, *store.k.shape[2:])
            for b in range(BATCH):
                assert np.isfinite(kept[b, : own_lengths[b]]).all()
                # The longest window that needs so large a ring.
                window = length[b] + 1 if store.ring is None else (store.ring - 1) * PAGE + 2
                assert own_lengths[b] >= min(length[b], window - 1)


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

    def prefix(pools, ring):
        return PagedPrefix(*map(jnp.asarray, pools), *readable(slots, ring, page))

    expected = reference.tree_attention(*inputs, prefix(whole, None), **settings)
    got = pallas_triton.tree_attention(*inputs, prefix(rings, ring), interpret=True, **settings)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_array_less(0.01, np.abs(expected).max(axis=(1, 2, 3)))


def test_stores_without_slots_have_no_rings():
    slots = slots_of([[NO_PAGE] * 5] * 2, [0, 0])
    config = with_windows(TINY, 1, PAGE, 11, None, 500)
    shapes = [store.k.shape[:2] for store in empty_stores(config, 9, PAGE, FLOAT32, slots)]
    assert shapes == [(2, PAGE), (2 * 2, PAGE), (2 * 4, PAGE), (9, PAGE), (2 * 5, PAGE)]
    assert {store.ring for store in empty_stores(config, 9, PAGE, FLOAT32)} == {None}


def test_only_full_layers_grow_with_the_capacity():
    config = dataclasses.replace(with_windows(TINY, 128, None, 1, 300), max_position_embeddings=1 << 17)
    decoder = make_decoder(config, None, PLAIN)
    row = config.layers[0].kv_size * 4

    def bytes_of(capacity):
        state = jax.eval_shape(lambda: EngineSize.of(config, 3, capacity).empty_state(decoder, FLOAT32))
        return [array_bytes(store) for store in state.stores]

    # A window of 128 looks back at 127 tokens in at most 3 pages of 64.
    rings = [3 * pages * 64 * row for pages in (3, 1, 6)]
    for capacity in (1024, 1 << 17):
        assert bytes_of(capacity) == [rings[0], 3 * capacity * row, *rings[1:]]
    # A slot of 2 pages has no use for more.
    assert bytes_of(128) == [3 * pages * 64 * row for pages in (2, 2, 1, 2)]
