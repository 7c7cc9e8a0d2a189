"""Best-first tree building on the device (JetSpec, arXiv 2606.18394)."""

import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from jetspec_jax.tree.algorithms import Algorithm, Plan, algorithm_of, get_algorithm
from jetspec_jax.tree.candidates import Candidates, top_candidates
from jetspec_jax.tree.contract import check_plan, check_tree
from jetspec_jax.tree.masks import path_sums
from jetspec_jax.tree.planning import Breadth, breadth_of, check_breadth, plan_of
from jetspec_jax.tree.profiles import Profile
from jetspec_jax.tree.routing import Hints, Routing
from jetspec_jax.tree.token_tree import BUCKETS, ROOT_INDEX, TokenTree, bucket_for, root_tree
from pallas_kernels.tree_growth import tree_growth


def grow_tree(
    candidates: Candidates,
    root_tokens: Int[Array, " B"],
    plan: Plan,
    budget: Int[Array, " B"],
    max_depth: Int[Array, " B"],
    *,
    num_nodes: int,
    width: int | None = None,
    one_by_one: bool = False,
    implementation: str | None = None,
) -> TokenTree:
    """Grows one tree per sequence, best node first, inside a traced program.

    Until the budget is reached or nothing can grow: take the unexpanded node with the highest
    priority, which is its cumulative log-probability unless the plan adds to it (the earliest
    inserted among equals), and append as its children the best `plan.caps[b, depth]` candidates of
    its depth's row; or, one by one, append the child that has the highest priority of all that are
    not there. A node of probability zero is never expanded. Where candidates have pairs, a node's
    children are the best below its own token, and among equals those that the row puts first.

    Args:
        candidates: the draft rows, best first.
        root_tokens: the anchors.
        plan: how it grows.
        budget: most nodes of each tree, root included, clipped to 1..N.
        max_depth: depth of the deepest node allowed; 0 leaves the root alone, more than D is D.
        num_nodes: N, at least 1; static.
        width: most children of a node, whatever the plan says; None is all candidates; static.
        one_by_one: whether children are inserted each by its own priority; static.
        implementation: of `pallas_kernels.tree_growth`; None picks the best.

    Raises:
        ValueError: there is no such implementation.
        NotImplementedError: it does not support the case or the device.
    """
    if num_nodes == 1:
        return root_tree(root_tokens, num_nodes)
    batch, rows, looked_at = candidates.tokens.shape
    caps = jnp.minimum(plan.caps, looked_at if width is None else width)
    within = jnp.arange(rows, dtype=jnp.int32)[None, :] < max_depth[:, None]
    log_probs, children = candidates.log_probs, None
    if candidates.pairs is not None:
        log_probs, children = jax.lax.top_k(candidates.pairs, looked_at if width is None else width)
    priorities = log_probs
    if plan.bonus is not None:
        # A candidate without probability has no priority, whatever the weight.
        weighed = jnp.where(log_probs > -jnp.inf, plan.weight * log_probs, -jnp.inf)
        priorities = weighed + jnp.expand_dims(plan.bonus, tuple(range(2, log_probs.ndim)))
    parents, ranks, depths, scores, counts = tree_growth(
        priorities,
        jnp.where(within, caps, 0).astype(jnp.int32),
        budget.astype(jnp.int32),
        num_nodes=num_nodes,
        one_by_one=one_by_one,
        children=children,
        implementation=implementation,
    )
    sequence = jnp.arange(batch, dtype=jnp.int32)[:, None]
    row = jnp.maximum(depths - 1, 0)
    drafted = candidates.tokens[sequence, row, ranks]
    if plan.bonus is not None:
        if candidates.pairs is None:
            own = log_probs[sequence, row, ranks]
        else:
            above = jnp.take_along_axis(ranks, jnp.maximum(parents, ROOT_INDEX), axis=1)
            own = candidates.pairs[sequence, row, above, ranks]
        own = jnp.where(depths > 0, own, 0.0)
        scores = jnp.where(scores > -jnp.inf, path_sums(own, parents, max_depth=rows), -jnp.inf)
    # Depth 0 is the root's and the padding's.
    is_root = jnp.arange(num_nodes, dtype=jnp.int32)[None, :] == ROOT_INDEX
    anchor = jnp.where(is_root, root_tokens.astype(jnp.int32)[:, None], 0)
    return TokenTree(jnp.where(depths > 0, drafted, anchor), parents, depths, scores, counts)


def build_tree(
    draft_logits: ArrayLike,
    root_tokens: ArrayLike | Sequence[int],
    *,
    budget: SupportsIndex,
    width: SupportsIndex | None = None,
    candidates: SupportsIndex | None = None,
    algorithm: str | Algorithm = "accum_logp",
    depth: SupportsIndex | None = None,
    routing: Hints | Sequence[Hints | None] | None = None,
    profile: Profile | Mapping[str, Any] | None = None,
    checked: bool = False,
    **options: Any,
) -> TokenTree:
    """Builds a token tree per sequence from draft logits.

    The tree has N = `bucket_for(budget)` slots and may stay below the budget when width and depth
    allow no more. Compiled once per shape, width, candidates, bucket and algorithm; budget and depth
    are traced.

    Args:
        draft_logits: floating [B, D, V], NumPy or JAX; row d drafts the tokens at depth d + 1.
        root_tokens: integer [B], the anchors.
        budget: most nodes, root included, in 1..256.
        width: most children of a node, in 1..V; None is all candidates.
        candidates: tokens of a row that are looked at, from the width on; None is the width, or without one
            the algorithm's own number.
        algorithm: one of `algorithm_names()`, or an algorithm with its options. The default is the
            reference implementation's and not that of decoding: a tree stays what it was.
        depth: depth of the deepest node allowed, in 1..D; None means D.
        routing: what is known of the sequences, one mapping for all or one for each, with any of
            "task", "mode" and "text"; some algorithms look at it.
        profile: measured acceptance, for algorithms that take it: see `Profile`.
        checked: whether to look at every value of the plan and of the trees, on the host: slow, and for
            algorithms that are new.
        **options: of the algorithm that is named, such as `beta` or `tau`.

    Raises:
        ValueError: an argument is out of its range or of the wrong shape, the algorithm's options are not
            hashable, or its plan is not traceable or misshapen. In the checked mode also: caps outside
            0..W, a bonus that is not finite, a plan that changes when it is made again or depends on other
            sequences, or trees that are none or go beyond a limit.
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
    given = {
        name: None if value is None else _integer(name, value, vocabulary, "the vocabulary")
        for name, value in (("width", width), ("candidates", candidates))
    }
    hints, meant = Routing.of(routing, batch), _algorithm(algorithm, options, profile)
    most_children, looked_at = breadth_of(meant, **given)
    check_breadth(Breadth(most_children, looked_at), vocabulary)
    if checked:
        check_plan(meant, _candidates(logits, most_children), hints)
    tree = _build(
        logits,
        roots,
        most_nodes,
        most_levels,
        hints,
        width=most_children,
        candidates=looked_at,
        num_nodes=bucket_for(most_nodes),
        algorithm=meant,
    )
    if checked:
        check_tree(meant, tree, width=most_children, budget=most_nodes, depth=most_levels)
    return tree


def _algorithm(
    named: str | Algorithm, options: Mapping[str, Any], profile: Profile | Mapping[str, Any] | None
) -> Algorithm:
    if isinstance(named, str):
        return get_algorithm(named, options, profile)
    own = algorithm_of(named)
    if options or profile is not None:
        raise ValueError(f"{named} has its options already; name the algorithm to give others")
    return own


def _integer(name: str, value: SupportsIndex, most: int, meaning: str) -> int:
    """`value` as an int in 1..most, or a ValueError that says so."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        number = operator.index(value)
        if 1 <= number <= most:
            return number
    raise ValueError(f"{name} must be an integer in 1..{most} ({meaning}), got {value!r}")


def _describe(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


_candidates = jax.jit(top_candidates, static_argnames="count")


@functools.partial(jax.jit, static_argnames=("width", "candidates", "num_nodes", "algorithm"))
def _build(
    logits: Float[Array, "B D V"],
    roots: Int[Array, " B"],
    budget: Int[ArrayLike, ""],
    depth: Int[ArrayLike, ""],
    routing: Routing,
    *,
    width: int,
    candidates: int,
    num_nodes: int,
    algorithm: Algorithm,
) -> TokenTree:
    rows = top_candidates(logits, candidates)
    budgets, depths = (jnp.broadcast_to(limit, roots.shape) for limit in (budget, depth))
    return grow_tree(
        rows,
        roots,
        plan_of(algorithm, rows.best(width), routing),
        budgets,
        depths,
        num_nodes=num_nodes,
        width=width,
        one_by_one=algorithm.one_by_one,
    )
