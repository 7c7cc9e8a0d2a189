"""What a tree, once it is verified, says about all smaller ones.

A tree grows best-first, and nothing but its end depends on the budget: the tree of a smaller budget is the
first nodes of a larger one. So one round shows what each smaller budget would have had accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int

from jetspec_jax.tree.token_tree import BUCKETS, ROOT_INDEX

#: Smaller trees hardly cost less than this where few sequences decode together.
USUAL_LEAST = 16


class Reach(NamedTuple):
    """Drafted tokens accepted with K budgets, as the head expects and as it was; the bonus is not counted.

    Attributes:
        expected: Sum of the probabilities that the head gives the nodes: each is accepted with its own.
        accepted: Nodes of the accepted path among the first so many.
    """

    expected: Float32[Array, "*rounds K"]
    accepted: Float32[Array, "*rounds K"]


def tree_buckets(most: int, least: int = USUAL_LEAST) -> tuple[int, ...]:
    """Buckets of drafted trees from ``least`` nodes to ``most``, a bucket; or that alone if it is less."""
    return tuple(bucket for bucket in BUCKETS[1:] if min(least, most) <= bucket <= most)


def reach_of(
    scores: Float32[Array, "*rounds N"], path: Int[Array, "*rounds D1"], budgets: Sequence[int]
) -> Reach:
    """What trees of some budgets, none larger than these, would have had accepted.

    Example: of nodes 0..5 with the path 0, 2, 5 a budget of 3 would have had 1 accepted, one of 6 has 2.

    Args:
        scores: Of the nodes of trees in the order in which they were inserted; -inf is padding.
        path: Nodes of the accepted path from the root on; -1 beyond.
        budgets: K numbers of nodes, root included.
    """
    ends = jnp.asarray(budgets).reshape((1,) * scores.ndim + (-1,))

    def total(nodes: Int[Array, "*rounds M"], of: Float32[Array, "*rounds M"]) -> Float32[Array, "*rounds K"]:
        """Of the nodes that each budget has, one by one; the root is not drafted."""
        inside = (nodes[..., None] > ROOT_INDEX) & (nodes[..., None] < ends)
        return jnp.where(inside, of[..., None], 0.0).sum(axis=-2)

    nodes = jax.lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return Reach(total(nodes, jnp.exp(scores)), total(path, jnp.ones(path.shape)))
