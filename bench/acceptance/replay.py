"""Replays rounds along known texts: what any tree would have accepted, without decoding with it.

The drafts at each token of a text determine the rounds of every algorithm, see `train.head.replay`. The first
nodes of a large tree are the tree of every smaller budget.

Shapes: A anchors, D draft depth, C budgets.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jetspec_jax.tree import Algorithm, Candidates, Routing, accept, bucket_for, grow_tree, plan_of, reach_of
from train.head.replay import Drafts

# Anchors that grow trees at once.
GROWN = 512


def accepted_along(
    drafts: Drafts, algorithm: Algorithm, candidates: int, budgets: Sequence[int]
) -> Int[np.ndarray, "A C"]:
    """The number of drafted tokens that a round at each anchor accepts with each budget.

    Args:
        algorithm: The tree algorithm; all candidates may be children of one node.
        candidates: Candidates per draft row.
        budgets: Nodes of the trees, root included.
    """
    rows = len(drafts.following)
    found = []
    for at in range(0, rows, GROWN):
        # The last part begins earlier, so that all parts have one shape.
        part = slice(max(min(at, rows - GROWN), 0), at + GROWN)
        rows_of_part = jax.tree.map(lambda array, part=part: array[part], drafts[:3])
        accepted = _accepted(*rows_of_part, algorithm=algorithm, count=candidates, budgets=tuple(budgets))
        found.append(np.asarray(accepted)[at - part.start :])
    return np.concatenate(found)


def rounds_along(accepted: Int[np.ndarray, "A"], counts: Sequence[int]) -> list[list[int]]:
    """The number of tokens that each round of each text commits; the last round may overshoot the text's end.

    Example: a text has 6 tokens, and 1, 0, 2, 0, 0, 0 drafted tokens are accepted at its anchors. The round
    at the prompt's last token commits 2 tokens, the next round 3, and the last round 1.

    Args:
        accepted: Accepted drafted tokens at each anchor, text after text.
        counts: Anchors of each text.
    """
    texts, first = [], 0
    for count in counts:
        rounds, at = [], 0
        while at < count:
            rounds.append(1 + int(accepted[first + at]))
            at += rounds[-1]
        texts.append(rounds)
        first += count
    return texts


@functools.partial(jax.jit, static_argnames=("algorithm", "count", "budgets"))
def _accepted(
    candidates: Candidates,
    following: Int[Array, "A D"],
    routing: Routing,
    *,
    algorithm: Algorithm,
    count: int,
    budgets: tuple[int, ...],
) -> Int[Array, "A C"]:
    rows, depth = following.shape
    # Pairs are probabilities among all candidates that were drafted.
    assert candidates.pairs is None or candidates.tokens.shape[2] == count, "pairs of other candidates"
    best = candidates.best(count)
    tree = grow_tree(
        best if candidates.pairs is None else candidates,
        jnp.zeros(rows, jnp.int32),
        plan_of(algorithm, best, routing),
        jnp.full(rows, max(budgets), jnp.int32),
        jnp.full(rows, depth, jnp.int32),
        num_nodes=bucket_for(max(budgets)),
        one_by_one=algorithm.one_by_one,
    )
    # On the text's path a node's choice is the text's next token. Choices elsewhere are never read.
    choices = jnp.take_along_axis(
        jnp.pad(following, ((0, 0), (0, 1)), constant_values=-1), tree.depths, axis=1
    )
    path = accept(tree, choices, max_depth=depth).path
    return reach_of(tree.scores, path, budgets).accepted.astype(jnp.int32)
