"""What a tree, once it is verified, says about all smaller ones.

A tree grows best-first, and nothing but its end depends on the budget: the tree of a smaller budget is the
first nodes of a larger one. So one round shows what each smaller budget would have had accepted.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32

from jetspec_jax.tree.token_tree import BUCKETS, ROOT_INDEX


class Reach(NamedTuple):
    """Drafted tokens accepted with K budgets, as the head expects and as it was; the bonus is not counted.

    Attributes:
        expected: Sum of the probabilities that the head gives the nodes: each is accepted with its own.
        accepted: Nodes of the accepted path among the first so many.
    """

    expected: Float32[np.ndarray, "*rounds K"]
    accepted: Int32[np.ndarray, "*rounds K"]


def tree_buckets(most: int) -> tuple[int, ...]:
    """The buckets of drafted trees up to ``most`` nodes: all but the root alone."""
    return tuple(bucket for bucket in BUCKETS[1:] if bucket <= most)


def reach_of(
    scores: Float32[np.ndarray, "*rounds N"], path: Int[np.ndarray, "*rounds D1"], budgets: Sequence[int]
) -> Reach:
    """What trees of some budgets, none larger than these, would have had accepted; on the host.

    Example: of nodes 0..5 with the path 0, 2, 5 a budget of 3 would have had 1 accepted, one of 6 has 2.

    Args:
        scores: Of the nodes of trees in the order in which they were inserted; -inf is padding.
        path: Nodes of the accepted path from the root on; -1 beyond.
        budgets: K numbers of nodes, root included, in rising order.
    """
    # Sums between one budget and the next; the root is not drafted.
    starts = [ROOT_INDEX + 1, *budgets[:-1]]
    drafted = np.add.reduceat(np.exp(scores[..., : budgets[-1]]), starts, axis=-1)
    passed = path[..., None]
    accepted = ((passed > ROOT_INDEX) & (passed < np.asarray(budgets))).sum(axis=-2, dtype=np.int32)
    return Reach(np.cumsum(drafted, axis=-1), accepted)
