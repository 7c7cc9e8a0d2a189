"""The number of tokens that smaller budgets would have had accepted, from one verified tree.

Trees grow best-first, so the tree of a smaller budget consists of the first nodes of a larger tree.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from jetspec_jax.tree.token_tree import BUCKETS, ROOT_INDEX


class Reach(NamedTuple):
    """Accepted drafted tokens for K budgets, expected and actual, without the bonus token.

    Attributes:
        expected: Sum of the head's probabilities of the nodes within each budget.
        accepted: Number of nodes of the accepted path within each budget.
    """

    expected: Float32[Array, "*rounds K"]
    accepted: Float32[Array, "*rounds K"]


def tree_buckets(most: int, least: int) -> tuple[int, ...]:
    """The buckets from ``least`` nodes to the bucket ``most``; only ``most`` if it is smaller."""
    return tuple(bucket for bucket in BUCKETS[1:] if min(least, most) <= bucket <= most)


def reach_of(
    scores: Float32[Array, "*rounds N"], path: Int[Array, "*rounds D1"], budgets: Sequence[int]
) -> Reach:
    """The tokens that smaller budgets would have had accepted.

    Example: for nodes 0..5 and the accepted path 0, 2, 5, a budget of 3 gives 1 token, a budget of 6 gives 2.

    Args:
        scores: Scores of the nodes in the order of insertion; -inf for padding.
        path: Nodes of the accepted path from the root on; -1 beyond.
        budgets: K budgets, root included, at most the tree's.
    """
    ends = jnp.asarray(budgets).reshape((1,) * scores.ndim + (-1,))

    def total(nodes: Int[Array, "*rounds M"], of: Float32[Array, "*rounds M"]) -> Float32[Array, "*rounds K"]:
        """The sum over the nodes within each budget, without the root."""
        inside = (nodes[..., None] > ROOT_INDEX) & (nodes[..., None] < ends)
        return jnp.where(inside, of[..., None], 0.0).sum(axis=-2)

    nodes = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return Reach(total(nodes, jnp.exp(scores)), total(path, jnp.ones(path.shape)))
