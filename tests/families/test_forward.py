"""Every family's forward pass, in all its ways, against what transformers gave and against each other."""

import functools

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
from tests.families import step_by_step
from tests.families.goldens import (
    EACH_PART,
    IDS,
    LONG_IDS,
    LONG_PLACES,
    RECURRENT,
    TOLERANCE,
    assert_logits_of_ids,
    golden_file,
    golden_logits,
    in_float64,
    long_golden_logits,
    long_in_float64,
)
from tests.float64 import Rounding, assert_rounded, reference_of
from tests.marks import wide
from train.loss.attention import CausalAttend

PAGE = 4


def test_logits_are_those_of_transformers(family, target):
    theirs = golden_logits(family)
    assert theirs.std() > 0.5
    assert_logits_of_ids(family, logits(target, IDS), theirs)


@pytest.mark.parametrize("family", RECURRENT)
def test_transformers_is_within_rounding_of_float64(family):
    assert_rounded(golden_logits(family), in_float64(family))
    assert_rounded(long_golden_logits(family), long_in_float64(family))


@pytest.mark.parametrize("family", [wide("qwen3_5_moe"), "qwen3_5", wide("qwen3_next")], indirect=True)
def test_many_chunks_of_a_recurrence(family, target):
    assert_rounded(logits(target, LONG_IDS)[LONG_PLACES], long_in_float64(family))


@pytest.mark.wide
@EACH_PART
def test_in_parts(family, target):
    """Single tokens, and chunks before and behind them: the same logits as at once."""
    assert_logits_of_ids(family, in_parts(target, (11, *(1,) * 11, 11)), golden_logits(family))


def in_parts(target, sizes):
    """Logits of `IDS`, a block after the other, each over stores of what went before."""
    batch, length = IDS.shape
    pages = -(-length // PAGE)
    tables = jnp.arange(batch * pages, dtype=jnp.int32).reshape(batch, pages)
    slots = Slots.of(tables, jnp.zeros(batch, jnp.int32))
    stores = empty_stores(target.config, batch * pages, PAGE, jnp.dtype(jnp.float32), slots)

    parts, start = [], 0
    for size in sizes:
        tokens = jnp.asarray(IDS[:, start : start + size])
        stores, part = step(target.config, target.weights, stores, slots, tokens)
        slots = slots._replace(lengths=slots.lengths + size)
        parts.append(part)
        start += size
    return jnp.concatenate(parts, axis=1)


@functools.partial(jax.jit, static_argnums=0)
def step(config, weights, stores, slots, tokens):
    model, block = bind(config, weights), Block.chain(tokens)
    output = model(tokens, block.positions(slots.lengths), attend_over(stores, slots, block))
    count = jnp.full(tokens.shape[:1], tokens.shape[1], jnp.int32)
    path = chain_path(*tokens.shape)
    return commit(stores, slots, output.stash, path, count), model.logits(output.hidden)


@EACH_PART
def test_under_training(family, target):
    """The attention of training, which is another, gives what decoding's gives: windows and sinks too."""

    @jax.jit
    def forward(weights, tokens):
        model, positions = bind(target.config, weights), Block.chain(tokens).depths
        return model.logits(model(tokens, positions, CausalAttend()).hidden)

    assert_logits_of_ids(family, forward(target.weights, jnp.asarray(IDS)), golden_logits(family))


@EACH_PART
def test_trees_node_by_node(family, target):
    check_nodes(family, target, prefix=23)


@pytest.mark.wide
@pytest.mark.parametrize("family", ["step3p7"], indirect=True)
def test_trees_behind_a_prefix_within_the_windows(family, target):
    check_nodes(family, target, prefix=3)


def check_nodes(family, target, prefix):
    """A node's logits are those of its path alone: the prefix, then the nodes from the root on."""
    rng = np.random.default_rng(prefix)
    drafts = rng.normal(size=(2, 9, target.config.vocab_size)).astype(np.float32)
    tree = build_tree(2 * drafts, IDS[:, prefix].tolist(), width=3, budget=24)
    at_once = np.asarray(tree_logits(target, IDS[:, :prefix], tree))
    parents, tokens = np.asarray(tree.parents), np.asarray(tree.tokens)
    assert np.asarray(tree.depths).max() > 3
    assert (np.asarray(tree.num_nodes) == 24).all()
    if family in RECURRENT:
        for b in range(2):
            ids = np.concatenate([IDS[b, :prefix], tokens[b]])[None]
            above = [*range(-1, prefix - 1), *np.where(parents[b] < 0, -1, parents[b]) + prefix]
            samples = step_by_step.logits(*golden_file(family), ids, Rounding(), above)
            assert_rounded(at_once[b], reference_of(samples[:, 0, prefix:]))
        return
    for node in range(24):
        # Filled up behind, which no earlier token sees: every path is as long as `IDS`, whose program it has.
        rows, last = np.zeros_like(IDS), []
        for b in range(2):
            path = [node]
            while parents[b, path[0]] >= 0:
                path.insert(0, parents[b, path[0]])
            own = [*IDS[b, :prefix], *tokens[b, path]]
            rows[b, : len(own)] = own
            last.append(len(own) - 1)
        alone = np.asarray(logits(target, rows))[np.arange(2), last]
        np.testing.assert_allclose(at_once[:, node], alone, rtol=0, atol=TOLERANCE)
