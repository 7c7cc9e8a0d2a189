"""Models with windows decode over rings as over stores of all tokens, however often the rings have turned."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import logits, tree_logits
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import chain_path, commit, empty_stores
from jetspec_jax.models import bind
from jetspec_jax.tree import build_tree
from tests.decode.tiny import TINY, random_target, with_nan, with_windows

FLOAT32 = jnp.dtype(jnp.float32)
PAGE, CHUNK, LIMIT = 4, 16, 256
# Nothing but itself, a page, several pages, all, and more than a slot can hold.
CONFIG = with_windows(TINY, 1, PAGE, 11, None, 2 * LIMIT)


@pytest.fixture(scope="module")
def target():
    return random_target(CONFIG, 5)


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(1).integers(0, CONFIG.vocab_size, (4, 200)).astype(np.int32)


@pytest.fixture(scope="module")
def dense(target, ids):
    """Logits of one forward over the whole sequences."""
    return np.asarray(logits(target, ids))


@pytest.mark.wide
def test_chunks_and_a_tree_over_rings(target, ids, dense):
    """Ragged chunks, then a tree, as deep as 17 windows and more."""
    rng = np.random.default_rng(2)
    batch, length = ids.shape
    tables = np.random.default_rng(0).permutation(batch * length // PAGE).reshape(batch, -1)
    slots = Slots.of(jnp.asarray(tables, jnp.int32), jnp.zeros(batch, jnp.int32))
    stores = with_nan(empty_stores(CONFIG, tables.size, PAGE, FLOAT32, slots))

    @jax.jit
    def forward(stores, slots, block):
        model = bind(CONFIG, target.weights)
        output = model(block.tokens, block.positions(slots.lengths), attend_over(stores, slots, block))
        return output.stash, model.logits(output.hidden)

    @jax.jit
    def step(stores, slots, tokens, count):
        stash, rows = forward(stores, slots, Block.chain(tokens))
        stores = commit(stores, slots, stash, chain_path(*tokens.shape), count)
        return stores, slots._replace(lengths=slots.lengths + count), rows

    done = np.zeros(batch, int)
    while (done < length - 8).any():
        # Some a whole chunk, some a part, some nothing, as in a batch whose slots do different things.
        counts = np.minimum(rng.choice([0, 3, CHUNK, CHUNK], batch), length - 8 - done)
        tokens = np.stack([np.resize(row[start:], CHUNK) for row, start in zip(ids, done, strict=True)])
        stores, slots, rows = step(stores, slots, jnp.asarray(tokens), jnp.asarray(counts, jnp.int32))
        for b, (start, count) in enumerate(zip(done, counts, strict=True)):
            np.testing.assert_allclose(rows[b, :count], dense[b, start : start + count], atol=1e-4)
        done += counts

    prefix = ids[:, : length - 8]
    drafts = 6 * rng.normal(size=(batch, 9, CONFIG.vocab_size)).astype(np.float32)
    tree = build_tree(drafts, ids[:, length - 8].tolist(), width=3, budget=24)
    assert tree.depths.max() > PAGE  # deeper than a window
    _, over_rings = forward(stores, slots, Block.of_tree(tree))
    np.testing.assert_allclose(over_rings, tree_logits(target, prefix, tree), atol=1e-4)


def test_tree_logits_past_the_window(target, ids, dense):
    """A prefix in one page as long as it is; the tree is the chain that follows."""
    rows = 10.0 * jax.nn.one_hot(ids[:, -7:], CONFIG.vocab_size)
    tree = build_tree(rows, ids[:, -8].tolist(), width=1, budget=24)
    np.testing.assert_array_equal(tree.tokens[:, :8], ids[:, -8:])
    ours = tree_logits(target, ids[:, :-8], tree)[:, :8]
    np.testing.assert_allclose(ours, dense[:, -8:], atol=1e-4)
