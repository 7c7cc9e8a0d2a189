"""What every kind of store does: a commit writes rows after the committed tokens, and nowhere else."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jetspec_jax.cache import paged
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.paged import PagedStore
from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.cache.ring import RingStore
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import after_forward, chain_path, commit
from jetspec_jax.models.layers import KV
from jetspec_jax.sampling.token_sets import NO_CHOICE
from pallas_kernels.paged_write import paged_write

BATCH, PAGE, NUM_PAGES, TABLE = 3, 4, 24, 8
# Pages of a ring, key/value heads and head size of each layer: of one model's layers some may differ.
LAYERS = [(None, 2, 4), (1, 1, 8), (None, 1, 8), (3, 2, 4), (1, 2, 4), (8, 1, 2)]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """A layer without keys, which carries a state along: of each slot the sum of its tokens' rows."""

    sums: jax.Array

    @property
    def layout(self):
        return type(self)

    def specs(self, axes):
        return replace(self, sums=PartitionSpec())

    def pick(self, numbers):
        return self

    def put(self, numbers, picked):
        return picked

    def with_slot(self, number, other, others):
        return replace(self, sums=self.sums.at[number].set(other.sums[others]))

    def view(self, slots, block):
        return self.sums[slots.numbers]

    @classmethod
    def commit_alike(cls, stores, slots, stash, path, count):
        taken = jnp.arange(path.shape[1])[None, :] < count[:, None]
        rows = [jnp.take_along_axis(own, jnp.maximum(path, 0)[:, :, None], axis=1) for own in stash]
        added = [jnp.where(taken[:, :, None], own, 0).sum(1) for own in rows]
        return [cls(store.sums.at[slots.numbers].add(x)) for store, x in zip(stores, added, strict=True)]


def make_store(ring, heads, size):
    """Nothing committed but NaN, so that a row in the wrong place shows."""
    pages = NUM_PAGES if ring is None else BATCH * ring
    k, v = (jnp.full((pages, PAGE, heads, size), jnp.nan) for _ in "kv")
    return PagedStore(k, v) if ring is None else RingStore(k, v, ring=ring)


@pytest.fixture
def stores():
    return (Sums(jnp.zeros((BATCH, 5))), *(make_store(*layer) for layer in LAYERS))


def make_stash(rng, nodes):
    # Small whole numbers, whose sums are exact in any order.
    sums = rng.integers(0, 99, (BATCH, nodes, 5)).astype(np.float32)
    pairs = [rng.standard_normal((2, BATCH, nodes, *rows), np.float32) for _, *rows in LAYERS]
    return jnp.asarray(sums), *(KV(*map(jnp.asarray, pair)) for pair in pairs)


def slots_of(tables, lengths):
    return Slots.of(jnp.asarray(tables, jnp.int32), jnp.asarray(lengths, jnp.int32))


def expected(stores, stash, slots, path, count):
    """Token by token: a path's node ``path[r]`` stands at position ``length + r``."""
    stores, stash, slots = jax.tree.map(np.array, (stores, stash, slots))
    for b, r in np.argwhere(np.arange(np.shape(path)[1])[None, :] < np.array(count)[:, None]):
        page, place = divmod(int(slots.lengths[b]) + r, PAGE)
        stores[0].sums[b] += stash[0][b, path[b][r]]
        for store, rows in zip(stores[1:], stash[1:], strict=True):
            if isinstance(store, RingStore):
                where = b * store.ring + page % store.ring
            else:
                where = slots.block_tables[b, page] if page < slots.block_tables.shape[1] else NO_PAGE
            if 0 <= where < len(store.k):
                store.k[where, place], store.v[where, place] = rows.k[b, path[b][r]], rows.v[b, path[b][r]]
    return stores


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


jitted_commit = jax.jit(commit)


@jax.jit
def one_by_one(stores, slots, stash, path, count):
    pairs = zip(stores, stash, strict=True)
    return tuple(store.commit_alike([store], slots, [own], path, count)[0] for store, own in pairs)


CHAIN = chain_path(BATCH, 4).tolist()
# Of 6 nodes; after the count there may be anything.
PATHS = [[0, 2, 5, -1], [0, 1, 2, 3], [0, -1, 6, -1]]
NOWHERE = (NUM_PAGES, 2**30, 2**30 + 1, 2**31 - 1, -1)


@pytest.mark.parametrize(
    ("tables", "lengths", "count", "path"),
    [
        pytest.param([[3, 7], [0, 5], [8, -1]], [2, 3, 0], [3, 4, 1], PATHS, id="over the edge of a page"),
        pytest.param([[3, 7], [0, 5], [8, 2]], [2, 0, 1], [4, 3, 1], CHAIN, id="a chain with padding"),
        pytest.param([[3, 7], [0, 5], [8, 2]], [2, 0, 1], [0, 0, 0], PATHS, id="nothing"),
        # A page that is none is not written, not even where its product overflows.
        *(
            pytest.param([[3, 7], [0, no], [no, no]], [7, 2, 0], [4] * 3, CHAIN, id=f"no page {no}")
            for no in NOWHERE
        ),
    ],
)
def test_commit(stores, tables, lengths, count, path):
    slots, stash = slots_of(tables, lengths), make_stash(np.random.default_rng(0), 6)
    given = jnp.asarray(path, jnp.int32), jnp.asarray(count, jnp.int32)
    written = jitted_commit(stores, slots, stash, *given)
    assert_equal(written, expected(stores, stash, slots, path, count))
    assert_equal(written, one_by_one(stores, slots, stash, *given))


def test_one_slot_of_a_batch(stores):
    slots, stash = slots_of([[3, 7], [0, 5], [8, 2]], [2, 3, 0]), make_stash(np.random.default_rng(0), 6)
    path, count = jnp.asarray(PATHS, jnp.int32), jnp.asarray([3, 4, 1], jnp.int32)
    together, alone = jitted_commit(stores, slots, stash, path, count), stores
    for b in range(BATCH):
        own = jax.tree.map(lambda x, b=b: x[b : b + 1], (slots, stash, path, count))
        alone = jitted_commit(alone, *own)
    assert_equal(together, alone)


def test_commits_of_any_length(stores, monkeypatch):
    """Also of chains longer than a ring; and all that a window may look back at can be read."""
    launches = []

    def noted(pools, blocks, nodes, places):
        launches.append((len(pools), places))
        return paged_write(pools, blocks, nodes, places)

    @jax.jit
    def write(stores, *args):
        launches.clear()
        return commit(stores, *args), [places for _, places in launches]

    @jax.jit
    def views(stores, slots):
        return [store.view(slots, Block.chain(jnp.zeros((BATCH, 1), jnp.int32))) for store in stores[1:]]

    monkeypatch.setattr(paged, "paged_write", noted)
    rng, nodes = np.random.default_rng(0), 21
    tables = rng.permutation(NUM_PAGES).reshape(BATCH, TABLE)
    length = np.zeros(BATCH, int)
    for count in ([0, 2, 9], [13, 0, 1], [1, 11, 17], [2, 0, 0], [8, 12, 3]):
        stash, slots = make_stash(rng, nodes), slots_of(tables, length)
        path = np.stack([rng.permutation(nodes) for _ in range(BATCH)]).astype(np.int32)
        by_hand = expected(stores, stash, slots, path, count)
        stores, places = write(stores, slots, stash, jnp.asarray(path), jnp.asarray(count, jnp.int32))
        assert_equal(stores, by_hand)
        for own in map(np.asarray, places):
            # Of two rows of a launch for one place, either might be the last.
            assert len(set(own[own >= 0])) == (own >= 0).sum()
        length += count
        for store, view in zip(stores[1:], views(stores, slots_of(tables, length)), strict=True):
            kept = np.asarray(store.k)[np.asarray(view.block_tables)].reshape(BATCH, -1, *store.k.shape[2:])
            # The longest window that needs so large a ring.
            window = (store.ring - 1) * PAGE + 2 if isinstance(store, RingStore) else max(length) + 1
            for own, seen, tokens in zip(kept, np.asarray(view.lengths), length, strict=True):
                assert np.isfinite(own[:seen]).all()
                assert seen >= min(tokens, window - 1)
    # Stores of one layout by one launch, keys and values of each: two with pages, two with rings of one page.
    assert sorted(pools for pools, _ in launches) == [2, 2, 4, 4]


def test_a_view_copies_no_rows(stores):
    slots, block = slots_of([[0]] * BATCH, [0] * BATCH), Block.chain(jnp.zeros((BATCH, 1), jnp.int32))
    for store in stores[1:]:
        view = store.view(slots, block)
        assert view.k_pages is store.k
        assert view.v_pages is store.v


def test_attention_asks_its_own_layer_s_store(stores):
    slots, stash = slots_of([[3, 7], [0, 5], [8, 2]], [0] * BATCH), make_stash(np.random.default_rng(0), 6)
    kv = jax.tree.map(lambda rows: rows[:, :1], stash[3])

    @jax.jit
    def attended(stores):
        count = jnp.full(BATCH, 6, jnp.int32)
        written = commit(stores, slots, stash, chain_path(BATCH, 6), count)
        block = Block.chain(jnp.zeros((BATCH, 1), jnp.int32))
        attend = attend_over(written, slots._replace(lengths=count), block)
        # A query of zeros sees all alike.
        return attend(3, jnp.zeros((BATCH, 1, 1, 8)), kv, scale=1.0, window=None)

    mean = jnp.concatenate([stash[3].v, kv.v], axis=1).mean(axis=1)
    np.testing.assert_allclose(attended(stores)[:, 0], mean, atol=1e-6)


def test_a_count_after_the_forward():
    """The count itself, of choices that there can be; and XLA cannot know that there are no others."""
    count = jnp.array([3, 0, 5], jnp.int32)
    assert after_forward(count, jnp.array([[0, 9], [4, 2], [7, 0]])).tolist() == [3, 0, 5]
    assert after_forward(count, jnp.array([[0, 9], [4, 2], [7, NO_CHOICE]])).tolist() == [3, 0, 5]
    assert after_forward(count, jnp.array([[0, 9], [4, 2], [7, NO_CHOICE - 1]])).tolist() == [3, 0, 0]
