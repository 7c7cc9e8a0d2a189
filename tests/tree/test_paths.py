"""The tokens on the way to a node."""

import jax.numpy as jnp
import numpy as np

from jetspec_jax.tree import TokenTree, path_tokens


def tree_of(tokens, parents):
    tokens, parents = np.array(tokens, np.int32), np.array(parents, np.int32)
    zeros = jnp.zeros(tokens.shape, jnp.int32)
    count = jnp.full(len(tokens), tokens.shape[1], jnp.int32)
    return TokenTree(jnp.asarray(tokens), jnp.asarray(parents), zeros, zeros.astype(jnp.float32), count)


def test_the_example():
    tree = tree_of([[7, 4, 5, 6]], [[-1, 0, 0, 1]])
    assert path_tokens(tree, 2).tolist() == [[[-1, -1], [4, -1], [5, -1], [6, 4]]]
    assert path_tokens(tree, 0).shape == (1, 4, 0)


def test_random_trees():
    rng = np.random.default_rng(0)
    parents = np.array([[-1, *(rng.integers(0, node) for node in range(1, 20))] for _ in range(5)])
    tokens = rng.integers(0, 9, parents.shape)
    got = np.asarray(path_tokens(tree_of(tokens, parents), 19))
    for row in range(5):
        for node in range(20):
            expected, at = [], node
            while at > 0:
                expected.append(tokens[row, at])
                at = parents[row, at]
            assert got[row, node].tolist() == expected + [-1] * (19 - len(expected))
