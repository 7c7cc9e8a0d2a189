"""Every family's forward pass, in all its ways, against what transformers gave and against each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax import logits, tree_logits
from jetspec_jax.block import Block
from jetspec_jax.cache import Slots, attend_over, commit, empty_stores
from jetspec_jax.models import bind
from jetspec_jax.tree import build_tree
from tests.families.goldens import IDS, TOLERANCE, golden_logits
from train.attention import causal_attend

pytestmark = pytest.mark.usefixtures("quick_compiles")
PAGE = 4


def close(ours, theirs):
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=0, atol=TOLERANCE)


def test_logits_are_those_of_transformers(family, target):
    theirs = golden_logits(family)
    assert theirs.std() > 0.5
    close(logits(target, IDS), theirs)


@pytest.mark.parametrize("sizes", [(1,) * 33, (20, 13)])
def test_in_parts(target, sizes):
    """A prompt in chunks, or token by token, over stores: the same logits as at once."""
    close(in_parts(target, sizes), logits(target, IDS))


def in_parts(target, sizes):
    """Logits of `IDS`, a block after the other, each over stores of what went before."""
    batch, length = IDS.shape
    pages = -(-length // PAGE)
    tables = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    slots = Slots.of(tables, jnp.zeros(batch, jnp.int32))
    stores = empty_stores(target.config, batch * pages, PAGE, jnp.dtype(jnp.float32), slots)

    @jax.jit
    def step(stores, slots, tokens):
        model, block = bind(target.config, target.weights), Block.chain(tokens)
        output = model(tokens, block.positions(slots.lengths), attend_over(stores, slots, block))
        count = jnp.full((batch,), tokens.shape[1], jnp.int32)
        return commit(stores, output.stash, slots, count), model.logits(output.hidden)

    parts, start = [], 0
    for size in sizes:
        stores, part = step(stores, slots, jnp.asarray(IDS[:, start : start + size]))
        slots = slots._replace(lengths=slots.lengths + size)
        parts.append(part)
        start += size
    return jnp.concatenate(parts, axis=1)


def test_under_training(target):
    """The attention of training, which is another, gives what decoding's gives: windows and sinks too."""

    @jax.jit
    def forward(weights, tokens):
        model, positions = bind(target.config, weights), Block.chain(tokens).depths
        return model.logits(model(tokens, positions, causal_attend()).hidden)

    close(forward(target.weights, jnp.asarray(IDS)), logits(target, IDS))


@pytest.mark.parametrize("prefix", [3, 25])
def test_trees_node_by_node(target, prefix):
    """A node's logits are those of its path alone: the prefix, then the nodes from the root on."""
    rng = np.random.default_rng(prefix)
    drafts = rng.normal(size=(2, 9, target.config.vocab_size)).astype(np.float32)
    tree = build_tree(2 * drafts, IDS[:, prefix].tolist(), width=3, budget=24)
    at_once = np.asarray(tree_logits(target, IDS[:, :prefix], tree))
    parents, tokens = np.asarray(tree.parents), np.asarray(tree.tokens)
    assert np.asarray(tree.depths).max() > 3
    # All paths in one batch, filled up behind, which no earlier token sees.
    rows, last, expected = [], [], []
    for b in range(2):
        for node in range(int(tree.num_nodes[b])):
            path = [node]
            while parents[b, path[0]] >= 0:
                path.insert(0, parents[b, path[0]])
            row = [*IDS[b, :prefix], *tokens[b, path]]
            last.append(len(row) - 1)
            rows.append(row + [0] * (prefix + 10 - len(row)))
            expected.append(at_once[b, node])
    alone = np.asarray(logits(target, np.asarray(rows, np.int32)))[np.arange(len(rows)), last]
    close(np.stack(expected), alone)
