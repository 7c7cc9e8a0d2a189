"""What a tree, once it is verified, says about all smaller ones.

A tree grows best-first, and nothing but its end depends on the budget: the tree of a smaller budget is the
first nodes of a larger one. So one round shows what each smaller budget would have had accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int, Int32

from jetspec_jax.tree.token_tree import BUCKETS, ROOT_INDEX, TokenTree


class Reach(NamedTuple):
    """Drafted tokens accepted with K budgets, as the head expects and as it was; the bonus is not counted.

    Attributes:
        expected: Sum of the probabilities that the head gives the nodes: each is accepted with its own.
        accepted: Nodes of the accepted path among the first so many.
    """

    expected: Float32[Array, "B K"]
    accepted: Int32[Array, "B K"]


def tree_buckets(most: int) -> tuple[int, ...]:
    """The buckets of drafted trees up to ``most`` nodes: all but the root alone."""
    return tuple(bucket for bucket in BUCKETS[1:] if bucket <= most)


def reach_of(tree: TokenTree, path: Int[Array, "B D1"], budgets: Sequence[int]) -> Reach:
    """What trees of some budgets, none larger than this tree's, would have had accepted.

    Example: of nodes 0..5 with the path 0, 2, 5 a budget of 3 would have had 1 accepted, one of 6 has 2.

    Args:
        tree: Trees in the order in which their nodes were inserted.
        path: Nodes of the accepted path from the root on; -1 beyond.
        budgets: K numbers of nodes, root included.
    """
    index = jnp.arange(tree.tokens.shape[1], dtype=jnp.int32)
    drafted = tree.valid & (index != ROOT_INDEX)[None, :]
    probabilities = jnp.where(drafted, jnp.exp(tree.scores), 0.0)
    limits = jnp.asarray(budgets, jnp.int32)
    expected = jnp.sum(
        jnp.where(index[None, None, :] < limits[None, :, None], probabilities[:, None, :], 0.0), axis=2
    )
    within = (path[:, None, :] > ROOT_INDEX) & (path[:, None, :] < limits[None, :, None])
    return Reach(expected, jnp.sum(within, axis=2, dtype=jnp.int32))
