"""Acceptance: the path through the tree that agrees with the target's choices."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Int, Int32

from jetspec_jax.tree.token_tree import ROOT_INDEX, TokenTree


class Acceptance(NamedTuple):
    """The accepted path of every sequence.

    Attributes:
        path: accepted nodes from the root on, one per depth 0..max_depth; -1 beyond.
        length: accepted drafted tokens. The root is not counted, so `path` has length + 1 nodes.
        bonus: the target's choice at the last accepted node, the next anchor.
    """

    path: Int32[Array, "B P"]
    length: Int32[Array, " B"]
    bonus: Int32[Array, " B"]


def accept(tree: TokenTree, choices: Int[ArrayLike, "B N"], *, max_depth: int) -> Acceptance:
    """Walks from the root to the child with the target's choice, until there is none.

    Exact for greedy and sampled choices: every committed token is the target's choice after the
    committed prefix. Among siblings with the same token, the earliest is accepted.

    Args:
        tree: the verified trees.
        choices: the target's next token at every node; ignored at padding.
        max_depth: static; a longer path is cut there and its bonus is the choice at the cut.
    """
    if max_depth < 0:
        raise ValueError(f"max_depth must be at least 0, not {max_depth}")
    batch, num_nodes = tree.tokens.shape
    choices = jnp.asarray(choices, jnp.int32)
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None, None, :]
    # next_node[b, n] is the child of n with the choice at n, or N if there is none. The walk is the
    # orbit of the root under this map, so it needs no sequential loop.
    chosen = (
        tree.valid[:, None, :]
        & (tree.parents[:, None, :] == jnp.arange(num_nodes, dtype=jnp.int32)[None, :, None])
        & (tree.tokens[:, None, :] == choices[:, :, None])
    )
    next_node = jnp.min(jnp.where(chosen, index, num_nodes), axis=2)

    # When `next_node` maps s steps ahead, the s known nodes of the path give the next s.
    path = jnp.full((batch, 1), ROOT_INDEX, jnp.int32)
    while path.shape[1] <= max_depth:
        path = jnp.concatenate([path, _next_of(next_node, path)], axis=1)
        next_node = _next_of(next_node, next_node)
    path = path[:, : max_depth + 1]

    reached = path < num_nodes
    length = jnp.sum(reached, axis=1, dtype=jnp.int32) - 1
    last = jnp.take_along_axis(path, length[:, None], axis=1)
    bonus = jnp.take_along_axis(choices, last, axis=1)[:, 0]
    return Acceptance(jnp.where(reached, path, -1), length, bonus)


def _next_of(pointers: Int32[Array, "B N"], nodes: Int32[Array, "B K"]) -> Int32[Array, "B K"]:
    """The pointers of the given nodes; N, past the end, points to itself."""
    return jnp.take_along_axis(pointers, nodes, axis=1, mode="fill", fill_value=pointers.shape[1])
