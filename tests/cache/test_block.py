"""The block's masks, positions and padding, drawn out."""

import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.cache.block import Block, causal_bits
from jetspec_jax.tree import build_tree


def unpacked(mask, rows):
    bits = np.asarray(mask)[..., None] >> np.arange(32, dtype=np.uint32) & 1
    return bits.reshape(*mask.shape[:-1], -1)[..., :rows].astype(bool)


@pytest.fixture(scope="module")
def tree():
    """10 nodes in 16 rows."""
    drafts = np.random.default_rng(0).standard_normal((1, 3, 20))
    return build_tree(drafts, [5], width=3, budget=10)


def test_a_chain_of_three_as_drawn():
    assert causal_bits(3).tolist() == [[0b001], [0b011], [0b111]]


@pytest.mark.parametrize("rows", [1, 32, 33])
def test_chains_and_full_blocks(rows):
    tokens = jnp.zeros((2, rows), jnp.int32)
    chain, full = Block.chain(tokens), Block.chain(tokens, "full")
    assert (unpacked(chain.mask(), rows) == np.tri(rows, dtype=bool)).all()
    assert unpacked(full.mask(), rows).all()
    assert (np.asarray(chain.parents) == np.arange(rows) - 1).all()
    lengths = jnp.array([0, 9], jnp.int32)
    assert (np.asarray(chain.positions(lengths)) == np.arange(rows) + np.array([[0], [9]])).all()
    for block in (chain, full):
        assert block.num_nodes.tolist() == [rows, rows]


def test_padding_is_said_and_no_real_token_sees_it(tree):
    chain = Block.chain(tree.tokens, num_nodes=jnp.array([10], jnp.int32))
    for block in (chain, Block.of_tree(tree), Block.of_tree(tree, max_depth=3)):
        assert block.num_nodes.tolist() == [10]
        seen = unpacked(block.mask(), 16)[0]
        assert seen.diagonal()[:10].all()
        assert not seen[:10, 10:].any()


def test_siblings_share_their_position_and_do_not_see_each_other(tree):
    block = Block.of_tree(tree)
    siblings = np.flatnonzero(np.asarray(tree.parents[0]) == 0)
    assert len(siblings) == 3
    assert (np.asarray(block.positions(jnp.array([7], jnp.int32)))[0, siblings] == 8).all()
    seen = unpacked(block.mask(), 16)[0]
    for node in siblings:
        assert sorted(np.flatnonzero(seen[node])) == [0, node]
