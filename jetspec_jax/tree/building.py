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

    Until the budget is reached or nothing can grow, the unexpanded node with the highest priority
    (the earliest inserted among equals) gets the best `plan.caps[b, depth]` candidates of its
    depth's row as children. One by one, the single child with the highest priority is inserted
    instead. A node's priority is its cumulative log-probability, plus the plan's bonus. A node of
    probability zero is never expanded. If candidates have pairs, a node's children are the best
    given its token, and among equals the first in the row.

    Args:
        candidates: the draft rows, best first.
        root_tokens: the anchors.
        plan: the growth plan.
        budget: most nodes of each tree, root included, clipped to 1..N.
        max_depth: largest depth of a node; 0 allows only the root, more than D means D.
        num_nodes: N, at least 1; static.
        width: most children of a node, in addition to the plan's caps; None means K; static.
        one_by_one: whether children are inserted individually by priority; static.
        implementation: of `pallas_kernels.tree_growth`; None picks the best.

    Raises:
        ValueError: the implementation is unknown.
        NotImplementedError: the implementation does not support the case or the device.
    """
    if num_nodes == 1:
        return root_tree(root_tokens, num_nodes)
    batch, rows, num_candidates = candidates.tokens.shape
    caps = jnp.minimum(plan.caps, num_candidates if width is None else width)
    within = jnp.arange(rows, dtype=jnp.int32)[None, :] < max_depth[:, None]
    log_probs, children = candidates.log_probs, None
    if candidates.pairs is not None:
        log_probs, children = jax.lax.top_k(candidates.pairs, num_candidates if width is None else width)
    priorities = log_probs
    if plan.bonus is not None:
        # A candidate of probability zero keeps the priority -inf, also if the weight is 0.
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
            increments = log_probs[sequence, row, ranks]
        else:
            above = jnp.take_along_axis(ranks, jnp.maximum(parents, ROOT_INDEX), axis=1)
            increments = candidates.pairs[sequence, row, above, ranks]
        increments = jnp.where(depths > 0, increments, 0.0)
        scores = jnp.where(scores > -jnp.inf, path_sums(increments, parents, max_depth=rows), -jnp.inf)
    # Nodes of depth 0 are the root and padding.
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

    The tree has N = `bucket_for(budget)` slots. It has fewer nodes than the budget if width and depth
    allow no more. Compiled once per shape, width, candidates, bucket and algorithm; budget and depth
    are traced.

    Args:
        draft_logits: floating [B, D, V], NumPy or JAX; row d drafts the tokens at depth d + 1.
        root_tokens: integer [B], the anchors.
        budget: most nodes, root included, in 1..256.
        width: most children of a node, in 1..V; None means the number of candidates.
        candidates: number of candidates per row, at least the width; None means the width, or without
            a width the algorithm's default.
        algorithm: one of `algorithm_names()`, or an algorithm with its options. The default is the
            reference implementation's, which differs from the default of decoding.
        depth: largest depth of a node, in 1..D; None means D.
        routing: routing hints, one mapping for all sequences or one for each, with any of the keys
            "task", "mode" and "text"; used by some algorithms.
        profile: measured acceptance, for algorithms that read it: see `Profile`.
        checked: whether to check all values of the plan and of the trees on the host. This is slow
            and meant for new algorithms.
        **options: options of a named algorithm, such as `beta` or `tau`.

    Raises:
        ValueError: an argument is out of range or has the wrong shape, the algorithm's options are not
            hashable, or its plan is misshapen or not traceable. With `checked` also: caps outside 0..W, a
            bonus that is not finite, a plan that is not deterministic or depends on other sequences, or
            trees that are invalid or exceed a limit.
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
    hints, chosen = Routing.of(routing, batch), _algorithm(algorithm, options, profile)
    most_children, num_candidates = breadth_of(chosen, **given)
    check_breadth(Breadth(most_children, num_candidates), vocabulary)
    if checked:
        check_plan(chosen, _candidates(logits, most_children), hints)
    tree = _build(
        logits,
        roots,
        most_nodes,
        most_levels,
        hints,
        width=most_children,
        candidates=num_candidates,
        num_nodes=bucket_for(most_nodes),
        algorithm=chosen,
    )
    if checked:
        check_tree(chosen, tree, width=most_children, budget=most_nodes, depth=most_levels)
    return tree


def _algorithm(
    named: str | Algorithm, options: Mapping[str, Any], profile: Profile | Mapping[str, Any] | None
) -> Algorithm:
    if isinstance(named, str):
        return get_algorithm(named, options, profile)
    algorithm = algorithm_of(named)
    if options or profile is not None:
        raise ValueError(f"{named} has its options already; pass the algorithm's name to give others")
    return algorithm


def _integer(name: str, value: SupportsIndex, most: int, meaning: str) -> int:
    """`value` as an int; raises ValueError unless it is an integer in 1..most."""
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
