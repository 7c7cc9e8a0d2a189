"""Best-first tree building on the device (JetSpec, arXiv 2606.18394)."""

import functools
import operator
from collections.abc import Sequence
from typing import SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from jetspec_jax.tree.algorithms import Algorithm, get_algorithm
from jetspec_jax.tree.candidates import Candidates, top_candidates
from jetspec_jax.tree.token_tree import BUCKETS, TokenTree, bucket_for, root_tree


def grow_tree(
    candidates: Candidates,
    root_tokens: Int[Array, " B"],
    caps: Int[Array, "B D"],
    budget: Int[Array, " B"],
    max_depth: Int[Array, " B"],
    *,
    num_nodes: int,
) -> TokenTree:
    """Grows one tree per sequence, best node first, inside a traced program.

    Until the budget is reached or nothing can grow: take the unexpanded node with the highest
    cumulative log-probability (the earliest inserted among equals) and append as its children the
    best `caps[b, depth]` candidates of its depth's row. Only `num_nodes` (N, at least 1) is
    static. A node of probability zero is never expanded.

    Args:
        candidates: the draft rows, best first.
        root_tokens: the anchors.
        caps: most children of a node at depth d, clipped to 0..W.
        budget: most nodes of each tree, root included, clipped to 1..N.
        max_depth: depth of the deepest node allowed; 0 leaves the root alone, more than D is D.
    """
    batch, rows, width = candidates.tokens.shape
    sequence = jnp.arange(batch, dtype=jnp.int32)
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None, :]
    tree = root_tree(root_tokens, num_nodes)
    if num_nodes == 1:
        return tree

    budget = jnp.clip(budget, 1, num_nodes).astype(jnp.int32)
    # Children of a node at depth 0..D; 0 also means "too deep", so one lookup answers both.
    within = jnp.arange(rows, dtype=jnp.int32)[None, :] < max_depth[:, None]
    fan_out = jnp.where(within, jnp.clip(caps, 0, width), 0).astype(jnp.int32)
    fan_out = jnp.pad(fan_out, ((0, 0), (0, 1)))

    # The score of every node still to expand, -inf for all others: those expanded, those that may
    # have no children, padding, and every node of a full tree. So each step adds nodes to every
    # sequence that can take any, and nothing is left to do when all are -inf.
    can_grow = (budget > 1) & (fan_out[:, 0] > 0)
    priority = jnp.where(can_grow[:, None], tree.scores, -jnp.inf)  # the root's alone

    def can_add(state: tuple[TokenTree, Array]) -> Array:
        _, priority = state
        return jnp.any(priority > -jnp.inf)

    def expand(state: tuple[TokenTree, Array]) -> tuple[TokenTree, Array]:
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
        child = sequence[:, None], depth[:, None], jnp.clip(rank, 0, width - 1)
        child_scores = score[:, None] + candidates.log_probs[child]
        child_grows = fan_out[sequence, depth + 1] > 0
        priority = jnp.where(index == node[:, None], -jnp.inf, priority)
        priority = jnp.where(new & child_grows[:, None], child_scores, priority)
        priority = jnp.where((num_nodes < budget)[:, None], priority, -jnp.inf)
        tree = TokenTree(
            tokens=jnp.where(new, candidates.tokens[child], tree.tokens),
            parents=jnp.where(new, node[:, None], tree.parents),
            depths=jnp.where(new, depth[:, None] + 1, tree.depths),
            scores=jnp.where(new, child_scores, tree.scores),
            num_nodes=num_nodes,
        )
        return tree, priority

    tree, _ = jax.lax.while_loop(can_add, expand, (tree, priority))
    return tree


def build_tree(
    draft_logits: ArrayLike,
    root_tokens: ArrayLike | Sequence[int],
    *,
    width: SupportsIndex,
    budget: SupportsIndex,
    algorithm: str = "accum_logp",
    depth: SupportsIndex | None = None,
) -> TokenTree:
    """Builds a token tree per sequence from draft logits.

    The tree has N = `bucket_for(budget)` slots and may stay below the budget when width and depth
    allow no more. Compiled once per shape, width, bucket and algorithm; budget and depth are
    traced.

    Args:
        draft_logits: floating [B, D, V], NumPy or JAX; row d drafts the tokens at depth d + 1.
        root_tokens: integer [B], the anchors.
        width: most children of a node, in 1..V.
        budget: most nodes, root included, in 1..256.
        algorithm: one of `algorithm_names()`.
        depth: depth of the deepest node allowed, in 1..D; None means D.

    Raises:
        ValueError: an argument is out of its range or of the wrong shape.
    """
    logits, roots = jnp.asarray(draft_logits), jnp.asarray(root_tokens)
    if logits.ndim != 3 or not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"draft_logits must be floating [B, D, V], got {_describe(logits)}")
    batch, rows, vocabulary = logits.shape
    if rows == 0:
        raise ValueError("draft_logits must have at least one row (D >= 1), got D = 0")
    if roots.shape != (batch,) or not jnp.issubdtype(roots.dtype, jnp.integer):
        raise ValueError(f"root_tokens must be integer [{batch}], got {_describe(roots)}")
    most_nodes = _integer("budget", budget, BUCKETS[-1], "nodes, root included")
    most_levels = rows if depth is None else _integer("depth", depth, rows, "rows of draft_logits")
    return _build(
        logits,
        roots,
        most_nodes,
        most_levels,
        width=_integer("width", width, vocabulary, "the vocabulary"),
        num_nodes=bucket_for(most_nodes),
        # The function, not its name: the compiled program is then that of this very function.
        algorithm=get_algorithm(algorithm),
    )


def _integer(name: str, value: SupportsIndex, most: int, meaning: str) -> int:
    """`value` as an int in 1..most, or a ValueError that says so."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = operator.index(value)
        if 1 <= number <= most:
            return number
    raise ValueError(f"{name} must be an integer in 1..{most} ({meaning}), got {value!r}")


def _describe(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


@functools.partial(jax.jit, static_argnames=("width", "num_nodes", "algorithm"))
def _build(
    logits: Float[Array, "B D V"],
    roots: Int[Array, " B"],
    budget: Int[ArrayLike, ""],
    depth: Int[ArrayLike, ""],
    *,
    width: int,
    num_nodes: int,
    algorithm: Algorithm,
) -> TokenTree:
    candidates = top_candidates(logits, width)
    budgets, depths = (jnp.broadcast_to(limit, roots.shape) for limit in (budget, depth))
    return grow_tree(candidates, roots, algorithm(candidates), budgets, depths, num_nodes=num_nodes)
