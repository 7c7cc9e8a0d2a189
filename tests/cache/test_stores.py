"""The commit: accepted rows of every layer go behind the committed tokens, and nowhere else."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import DecodeWeights, TreeDecoder
from jetspec_jax.cache.stores import Slots, Store, commit
from jetspec_jax.decode.prefill import prefill
from jetspec_jax.decode.proposer import DraftHeadProposer, taps_of
from jetspec_jax.decode.unseen import feed
from jetspec_jax.models import abstract, weights_of
from jetspec_jax.models.layers import KV
from tests.decode.tiny import TINY, head_config, with_windows

pytestmark = pytest.mark.usefixtures("quick_compiles")

PAGE, NO_PAGE = 4, 9  # pages 0..8
NUM_NODES = 6
# (key/value heads, head size) of each layer: of one model's layers some may differ.
LAYERS = [(2, 4), (1, 8), (2, 4)]


@pytest.fixture
def stores():
    """Nothing committed but NaN, so that a row in the wrong place shows."""
    shape = (NO_PAGE, PAGE)
    return tuple(Store(*(jnp.full((*shape, *layer), jnp.nan) for _ in "kv")) for layer in LAYERS)


@pytest.fixture
def stash():
    rng = np.random.default_rng(0)
    return tuple(
        KV(*(jnp.asarray(rng.standard_normal((3, NUM_NODES, *layer)), jnp.float32) for _ in "kv"))
        for layer in LAYERS
    )


def slots(tables, lengths):
    return Slots.of(jnp.asarray(tables, jnp.int32), jnp.asarray(lengths, jnp.int32))


def expected(stores, stash, slots, counts, paths):
    """Row by row; a path's node ``path[r]`` stands at position ``length + r``."""
    stores = jax.tree.map(np.array, stores)
    for pool, block in zip(jax.tree.leaves(stores), jax.tree.leaves(stash), strict=True):
        for b, (count, path) in enumerate(zip(counts, paths, strict=True)):
            for r in range(count):
                page, place = divmod(int(slots.lengths[b]) + r, PAGE)
                if page < slots.block_tables.shape[1] and slots.block_tables[b, page] < NO_PAGE:
                    pool[slots.block_tables[b, page], place] = block[b, path[r]]
    return stores


def run(stores, stash, slots, counts, **kwargs):
    return jax.jit(partial(commit, **kwargs))(stores, stash, slots, jnp.asarray(counts, jnp.int32))


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


PATHS = [[0, 2, 5, -1], [0, 1, 2, 3], [0, -1, -1, -1]]


def test_path(stores, stash):
    """Nodes that are no prefix of the block, over the edge of a page, behind different lengths."""
    where = slots([[3, 7, NO_PAGE], [0, 5, 1], [8, NO_PAGE, NO_PAGE]], [2, 7, 0])
    counts = [3, 4, 1]
    written = run(stores, stash, where, counts, path=jnp.asarray(PATHS, jnp.int32))
    assert_equal(written, expected(stores, stash, where, counts, PATHS))
    assert np.isfinite(written[1].k).sum() == 8 * sum(counts)


def test_chain(stores, stash):
    """Without a path the rows stand in logical order; what a chunk pads is not written."""
    where = slots([[3, 7], [0, 5], [8, 2]], [2, 0, 1])
    counts = [NUM_NODES, 4, 1]
    chain = [list(range(NUM_NODES))] * 3
    written = run(stores, stash, where, counts)
    assert_equal(written, expected(stores, stash, where, counts, chain))
    path = jnp.asarray(chain, jnp.int32)
    assert_equal(written, run(stores, stash, where, counts, path=path))


def test_count_of_zero(stores, stash):
    where = slots([[3, 7], [0, 5], [8, 2]], [2, 0, 1])
    assert_equal(run(stores, stash, where, [0, 0, 0], path=jnp.asarray(PATHS, jnp.int32)), stores)


@pytest.mark.parametrize("no_page", [NO_PAGE, 2**30, 2**30 + 1, 2**31 - 1, -1])
def test_overshoot_is_dropped(stores, stash, no_page):
    """Behind the table's end, and on an entry that is no page: not even where its product overflows."""
    where = slots([[3, 7], [0, no_page], [no_page, no_page]], [7, 2, 0])
    counts = [4, 4, 4]
    paths = [[0, 1, 2, 3]] * 3
    written = run(stores, stash, where, counts, path=jnp.asarray(paths, jnp.int32))
    assert np.isfinite(written[1].k).sum() == 8 * (1 + 2)
    where = slots(jnp.where(where.block_tables == no_page, NO_PAGE, where.block_tables), where.lengths)
    assert_equal(written, expected(stores, stash, where, counts, paths))


def test_one_slot_of_a_batch(stores, stash):
    """A prompt chunk commits for one slot what a batch commits for it."""
    where = slots([[3, 7, 1], [0, 5, 4], [8, 2, 6]], [2, 7, 0])
    counts, path = [3, 4, 1], jnp.asarray(PATHS, jnp.int32)
    together = run(stores, stash, where, counts, path=path)
    alone = stores
    for b in range(3):
        own = jax.tree.map(lambda x, b=b: x[b : b + 1], (stash, where, path))
        alone = run(alone, own[0], own[1], counts[b : b + 1], path=own[2])
    assert_equal(together, alone)


def test_layers_share_pages(stores, stash):
    fewer = jax.tree.map(lambda x: x[1:], stores[1])
    with pytest.raises(ValueError, match=r"pools\[2\] is \(8, 4, 1, 8\), expected \(9, 4, 1, 8\)"):
        run((stores[0], fewer, stores[2]), stash, slots([[0]] * 3, [0] * 3), [1] * 3)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize(("program", "bucket"), [("decode", 1), ("decode", 16), ("prefill", 1), ("feed", 1)])
def test_stores_are_written_in_place(program, bucket, slots):
    """No compiled program copies a store: that would cost more than all else in a round."""
    config = with_windows(TINY, None, 300)  # the window takes 20 pages of 16
    head = head_config(config)
    weights = DecodeWeights(weights_of(abstract(config)), weights_of(abstract(head)))
    decoder = TreeDecoder(config, DraftHeadProposer(head), bucket=bucket)
    state = jax.eval_shape(
        lambda: decoder.empty_state(
            slots,
            num_pages=37,
            pages_per_slot=23,
            page_size=16,
            dtype=jnp.dtype(jnp.float32),
            unseen_rows=640,
        )
    )
    number = jax.ShapeDtypeStruct((), jnp.int32)
    alone = weights._replace(proposer=None), dataclasses.replace(state, proposer=None)
    if program == "decode" and bucket == 1:
        lowered = decoder.program.lower(decoder, *alone, number)
    elif program == "decode":
        lowered = decoder.program.lower(decoder, weights, state, number)
    elif program == "feed":
        own = decoder.proposer, weights.proposer, state.proposer
        taps = {"features": decoder.features, "dtype": state.stores[0].k.dtype}
        lowered = feed.lower(*own, state.unseen, state.slots, number, number, **taps)
    else:
        chunk = jax.ShapeDtypeStruct((32,), jnp.int32)
        is_last = jax.ShapeDtypeStruct((), bool)
        taps = taps_of(decoder.proposer)
        lowered = prefill.lower(config, taps, None, *alone, number, chunk, number, is_last)
    text = lowered.compile().as_text()
    kv, size = config.layers[0].num_kv_heads, config.layers[0].head_dim
    stores = [
        rf"f32\[({pages},16,{kv},{size}|{pages * 16},{kv},{size}|{pages * 16},{kv * size})\]"
        for pages in ((37,) if program == "feed" else (37, slots * 20))  # the head has no windows
    ]
    for store in (*stores, rf"s32\[{slots},640,{decoder.features}\]"):
        assert re.search(store, text)
        assert re.findall(rf"= {store}\S* copy(?:-start)?\(.*", text) == []
