"""What a verified tree says about smaller ones: the same as building and verifying those."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.tree import accept, algorithm_names, build_tree, reach_of, tree_buckets
from tests.marks import wide

accepted = jax.jit(accept, static_argnames="max_depth")

BUDGETS = (2, 3, 5, 16, 33, 64)
DEPTH, VOCAB, WIDTH = 6, 12, 4


def followed(tree, truth):
    """Choices that continue along the true tokens as long as the path does, and elsewhere go nowhere."""
    choices = np.full(tree.tokens.shape, VOCAB, np.int32)
    tree = jax.tree.map(np.asarray, tree)
    for b, own in enumerate(truth):
        on_path = {0}
        for node in range(tree.num_nodes[b]):
            depth = tree.depths[b, node]
            if node and tree.parents[b, node] in on_path and tree.tokens[b, node] == own[depth - 1]:
                on_path.add(node)
            if node in on_path and depth < DEPTH:
                choices[b, node] = own[depth]
    return jnp.asarray(choices)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("accum_logp", "top_nodes", "hybrid", "task_router") else wide(name)
        for name in algorithm_names()
        if name != "chain"
    ],
)
def test_a_tree_knows_what_every_smaller_one_would_have_had_accepted(name):
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(3, DEPTH, VOCAB)).astype(np.float32) * 2
    # The true tokens are likely ones, so that paths are deep.
    truth = np.argsort(-logits, axis=-1)[:, :, :2][
        np.arange(3)[:, None], np.arange(DEPTH), rng.integers(0, 2, (3, DEPTH))
    ]

    def grown(budget):
        return build_tree(logits, [0, 0, 0], width=WIDTH, budget=budget, algorithm=name)

    tree = grown(64)
    path, _, _ = accepted(tree, followed(tree, truth), max_depth=DEPTH)
    reach = reach_of(tree.scores, path, BUDGETS)
    for k, budget in enumerate(BUDGETS):
        small = grown(budget)
        _, lengths, _ = accepted(small, followed(small, truth), max_depth=DEPTH)
        np.testing.assert_array_equal(reach.accepted[:, k], lengths)
        drafted = np.where(np.asarray(small.valid), np.exp(small.scores), 0.0)[:, 1:]
        np.testing.assert_allclose(reach.expected[:, k], drafted.sum(axis=1), rtol=1e-5)
    assert reach.accepted[:, -1].max() >= 1


def test_buckets_of_trees():
    assert tree_buckets(64, 16) == (16, 32, 64)
    assert tree_buckets(64, 2) == (2, 4, 8, 16, 32, 64)
    assert tree_buckets(8, 16) == (8,)
    assert tree_buckets(8, 4) == (4, 8)
    assert tree_buckets(1, 16) == ()
