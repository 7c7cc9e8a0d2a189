"""Best-first growth in plain JAX: the specification, the test oracle and the fallback."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32


class Growth(NamedTuple):
    """A batch of trees whose node 0 is the root. Parents come before their children.

    Padding, the nodes from `num_nodes` on, has parent -1, rank 0, depth 0 and score -inf.

    Attributes:
        parents: Index of each node's parent, -1 for the root.
        ranks: Which candidate of its level a node is, whatever its place among its siblings; 0 for the root.
        depths: Distance from the root.
        scores: Sum of the log-probabilities from the root on, whose own is 0.
        num_nodes: Nodes of each tree, root included.
    """

    parents: Int32[Array, "B N"]
    ranks: Int32[Array, "B N"]
    depths: Int32[Array, "B N"]
    scores: Float32[Array, "B N"]
    num_nodes: Int32[Array, "B"]


def roots(batch: int, num_nodes: int) -> Growth:
    """Trees of the root alone: where growing starts."""
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None, :]
    zeros = jnp.zeros((batch, num_nodes), jnp.int32)
    scores = jnp.where(index == 0, jnp.float32(0), -jnp.inf)
    return Growth(
        parents=zeros - 1,
        ranks=zeros,
        depths=zeros,
        scores=jnp.broadcast_to(scores, zeros.shape),
        num_nodes=jnp.ones((batch,), jnp.int32),
    )


def tree_growth(
    log_probs: Float32[Array, "B D *K W"],
    fan_out: Int32[Array, "B D1"],
    budget: Int32[Array, "B"],
    *,
    num_nodes: int,
    one_by_one: bool = False,
    children: Int32[Array, "B D K W"] | None = None,
) -> Growth:
    """See `api.tree_growth`, which clips `fan_out` and appends a zero for the nodes at depth D."""
    if one_by_one:
        return _one_by_one(log_probs, fan_out, budget, children, num_nodes=num_nodes)
    batch, *_, width = log_probs.shape
    sequence = jnp.arange(batch, dtype=jnp.int32)
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None, :]
    budget = jnp.clip(budget, 1, num_nodes)
    tree = roots(batch, num_nodes)

    # The score of every node still to expand, -inf for all others: those expanded, those that may
    # have no children, padding, and every node of a full tree. So each step adds nodes to every
    # sequence that can take any, and nothing is left to do when all are -inf.
    can_grow = (budget > 1) & (fan_out[:, 0] > 0)
    priority = jnp.where(can_grow[:, None], tree.scores, -jnp.inf)  # the root's alone

    def expand(state: tuple[Growth, Array]) -> tuple[Growth, Array]:
        tree, priority = state
        node = jnp.argmax(priority, axis=1).astype(jnp.int32)  # the first, so the earliest
        score = priority[sequence, node]
        depth = tree.depths[sequence, node]
        room = jnp.minimum(fan_out[sequence, depth], budget - tree.num_nodes)
        added = jnp.where(score > -jnp.inf, room, 0)
        num_nodes = tree.num_nodes + added

        # A select over all nodes, not a scatter: a step is elementwise work that fuses.
        rank = index - tree.num_nodes[:, None]
        new = (rank >= 0) & (rank < added[:, None])
        child = sequence[:, None], depth[:, None]
        if children is not None:
            child = *child, tree.ranks[sequence, node][:, None]
        child = *child, jnp.clip(rank, 0, width - 1)
        child_scores = score[:, None] + log_probs[child]
        child_grows = fan_out[sequence, depth + 1] > 0
        priority = jnp.where(index == node[:, None], -jnp.inf, priority)
        priority = jnp.where(new & child_grows[:, None], child_scores, priority)
        priority = jnp.where((num_nodes < budget)[:, None], priority, -jnp.inf)
        tree = Growth(
            parents=jnp.where(new, node[:, None], tree.parents),
            ranks=jnp.where(new, rank if children is None else children[child], tree.ranks),
            depths=jnp.where(new, depth[:, None] + 1, tree.depths),
            scores=jnp.where(new, child_scores, tree.scores),
            num_nodes=num_nodes,
        )
        return tree, priority

    return _repeat(expand, tree, priority)


def _one_by_one(
    log_probs: Float32[Array, "B D *K W"],
    fan_out: Int32[Array, "B D1"],
    budget: Int32[Array, "B"],
    children: Int32[Array, "B D K W"] | None,
    *,
    num_nodes: int,
) -> Growth:
    """Growth by single children: every node offers the first of its children that is not there yet."""
    batch, levels, *_, width = log_probs.shape
    sequence = jnp.arange(batch, dtype=jnp.int32)
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None, :]
    budget = jnp.clip(budget, 1, num_nodes)

    def offer(score: Array, depth: Array, candidate: Array, place: Array) -> Array:
        """The score of the child in some place of a node's row, -inf where the node may have none.

        ``candidate`` is which of its level's the node itself is.
        """
        level = jnp.minimum(depth, levels - 1)
        row = (level,) if children is None else (level, candidate)
        own = score + log_probs[sequence, *row, jnp.minimum(place, width - 1)]
        return jnp.where((place < fan_out[sequence, depth]) & (own > -jnp.inf), own, -jnp.inf)

    zeros = jnp.zeros((batch,), jnp.int32)
    tree = roots(batch, num_nodes)
    offers = jnp.where(index == 0, offer(tree.scores[:, 0], zeros, zeros, zeros)[:, None], -jnp.inf)
    offers = jnp.where((budget > 1)[:, None], offers, -jnp.inf)

    def add(state: tuple[Growth, Array, Array]) -> tuple[Growth, Array, Array]:
        tree, places, offers = state
        node = jnp.argmax(offers, axis=1).astype(jnp.int32)  # the first, so the earliest
        score = offers[sequence, node]
        adds = score > -jnp.inf
        depth, place = tree.depths[sequence, node], places[sequence, node]
        num_nodes = tree.num_nodes + adds

        new = (index == tree.num_nodes[:, None]) & adds[:, None]
        here = (index == node[:, None]) & adds[:, None]
        parent, rank = zeros, place
        if children is not None:
            parent = tree.ranks[sequence, node]
            # Within bounds wherever a node is added.
            rank = children[sequence, depth, parent, place]
        next_one = offer(tree.scores[sequence, node], depth, parent, place + 1)
        # At depth D there is a zero to look up, and no node is deeper.
        first_child = offer(score, depth + 1, rank, zeros)
        offers = jnp.where(here, next_one[:, None], offers)
        offers = jnp.where(new, first_child[:, None], offers)
        offers = jnp.where((num_nodes < budget)[:, None], offers, -jnp.inf)
        tree = Growth(
            parents=jnp.where(new, node[:, None], tree.parents),
            ranks=jnp.where(new, rank[:, None], tree.ranks),
            depths=jnp.where(new, depth[:, None] + 1, tree.depths),
            scores=jnp.where(new, score[:, None], tree.scores),
            num_nodes=num_nodes.astype(jnp.int32),
        )
        return tree, places + here, offers

    return _repeat(add, tree, jnp.zeros((batch, num_nodes), jnp.int32), offers)


def _repeat(step: Callable[[Any], Any], *state: Any) -> Growth:
    """The tree, which is first in a state, after steps until the scores, which are last, are all -inf."""
    return jax.lax.while_loop(lambda state: jnp.any(state[-1] > -jnp.inf), step, state)[0]
