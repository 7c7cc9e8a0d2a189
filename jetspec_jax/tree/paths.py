"""The tokens on the paths from a tree's root to its nodes."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jetspec_jax.tree.token_tree import ROOT_INDEX, TokenTree


def path_tokens(tree: TokenTree, max_depth: int) -> Int32[Array, "B N D"]:
    """The tokens of each node and of its ancestors below the root, the node's first; -1 beyond.

        tree          tokens          D = 2
          0           [7, 4, 5, 6]    n=0    -1 -1
         / \\                         n=1     4 -1
        1   2                         n=2     5 -1
        |                             n=3     6  4
        3

    Args:
        tree: the trees.
        max_depth: D, a static bound on the depths.
    """
    at = jnp.broadcast_to(jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)[None, :], tree.tokens.shape)
    rows = []
    for _ in range(max_depth):
        node = jnp.maximum(at, ROOT_INDEX)
        token = jnp.take_along_axis(tree.tokens, node, axis=1, mode="promise_in_bounds")
        rows.append(jnp.where(at > ROOT_INDEX, token, -1))
        at = jnp.take_along_axis(tree.parents, node, axis=1, mode="promise_in_bounds")
    return jnp.stack(rows, axis=2) if rows else jnp.zeros((*tree.tokens.shape, 0), jnp.int32)
