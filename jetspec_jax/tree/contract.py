"""Checks an algorithm's contract on values: on its plans, and on the trees that they give.

The checks run on the host, outside of compiled programs, so that errors can show values.
"""

from collections import Counter

import jax
import numpy as np

from jetspec_jax.tree.algorithms import Algorithm, Plan, name_of
from jetspec_jax.tree.candidates import Candidates
from jetspec_jax.tree.planning import check_traceable, plan_of
from jetspec_jax.tree.routing import Routing
from jetspec_jax.tree.token_tree import NO_PARENT, ROOT_INDEX, TokenTree

# Sums may be rounded differently in another batch or along another path.
_TOLERANCE = 1e-4


def check_plan(algorithm: Algorithm, candidates: Candidates, routing: Routing) -> None:
    """Computes the plan for some candidates several times, and checks every value.

    Raises:
        ValueError: The plan is misshapen or cannot be traced, a cap is outside 0..W, a bonus is not finite,
            the plan is not deterministic, or a sequence's plan depends on its batch. All problems are listed
            after the algorithm's name.
    """
    _, depth, width = candidates.tokens.shape
    check_traceable(algorithm, depth=depth, width=width)
    plan = plan_of(algorithm, candidates, routing)
    caps, wrong = np.asarray(plan.caps), []
    for b, d in np.argwhere((caps < 0) | (caps > width))[:1]:
        wrong.append(f"the cap of sequence {b} at depth {d} is {caps[b, d]}, outside 0..{width}")
    if plan.bonus is not None:
        bonus = np.asarray(plan.bonus)
        for b, d in np.argwhere(~np.isfinite(bonus))[:1]:
            wrong.append(f"the bonus of sequence {b} at depth {d} is {bonus[b, d]}, not finite")
    if again := _difference(plan, plan_of(algorithm, candidates, routing)):
        wrong.append(f"plan is not deterministic: called again with the same candidates, {again}")
    elif across := _looks_across(algorithm, candidates, routing, plan):
        wrong.append(across)
    _refuse(algorithm, wrong)


def check_tree(
    algorithm: Algorithm, tree: TokenTree, *, width: int, budget: int, depth: int | None = None
) -> None:
    """Checks every node of a batch of trees.

    Args:
        algorithm: The algorithm that built the trees, for its name.
        tree: The trees.
        width: Most children of a node.
        budget: Most nodes of a tree, root included.
        depth: Largest depth of a node; None means no limit.

    Raises:
        ValueError: A tree has no nodes or too many; node 0 is not a root; a parent comes after its child; a
            depth is not the parent's plus one, or too large; a node has too many children, or two with the
            same token; or a score is above the parent's. All problems are listed.
    """
    wrong = []
    columns = (np.asarray(x) for x in (tree.tokens, tree.parents, tree.depths, tree.scores, tree.num_nodes))
    for b, (tokens, parents, depths, scores, count) in enumerate(zip(*columns, strict=True)):
        if not 1 <= count <= min(budget, len(tokens)):
            wrong.append(f"the tree of sequence {b} has {count} nodes, with a budget of {budget}")
            continue
        found = _broken_nodes(tokens[:count], parents[:count], depths[:count], scores[:count], width, depth)
        wrong += [f"in the tree of sequence {b}, {problem}" for problem in found]
    _refuse(algorithm, wrong)


def _refuse(algorithm: Algorithm, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(f"tree algorithm {name_of(algorithm)!r}: {'; '.join(wrong)}")


def _difference(plan: Plan, other: Plan, first: int = 0) -> str | None:
    """The first difference between two plans, or None; ``first`` is the index of their first sequence."""
    if plan.weight != other.weight:
        return f"weight is {other.weight} and not {plan.weight}"
    if (plan.bonus is None) != (other.bonus is None):
        return f"bonus is {'None' if other.bonus is None else 'an array'}, unlike before"
    for name, expected, found in (("cap", plan.caps, other.caps), ("bonus", plan.bonus, other.bonus)):
        expected, found = np.asarray(expected, np.float64), np.asarray(found, np.float64)
        same = np.isclose(expected, found, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        for b, d in np.argwhere(~same)[:1]:
            where = f"the {name} of sequence {first + b} at depth {d}"
            return f"{where} is {found[b, d]:g} and not {expected[b, d]:g}"
    return None


def _looks_across(algorithm: Algorithm, candidates: Candidates, routing: Routing, plan: Plan) -> str | None:
    """The first sequence whose plan depends on its batch, with the difference, or None."""
    for b in range(len(candidates.tokens)):
        alone, hints = jax.tree.map(lambda rows, b=b: rows[b : b + 1], (candidates, routing))
        here = plan._replace(
            caps=plan.caps[b : b + 1], bonus=None if plan.bonus is None else plan.bonus[b : b + 1]
        )
        if difference := _difference(here, plan_of(algorithm, alone, hints), b):
            return f"plan looks across sequences: without the others of its batch, {difference}"
    return None


def _broken_nodes(
    tokens: np.ndarray,
    parents: np.ndarray,
    depths: np.ndarray,
    scores: np.ndarray,
    width: int,
    depth: int | None,
) -> list[str]:
    """Problems of the nodes of one tree, the first of each kind; all arrays are [nodes]."""
    if parents[ROOT_INDEX] != NO_PARENT or depths[ROOT_INDEX] != 0:
        return [f"node {ROOT_INDEX} has parent {parents[ROOT_INDEX]} and depth {depths[ROOT_INDEX]}: no root"]
    nodes = np.arange(len(tokens))[1:]
    above = parents[1:]
    for n in nodes[(above < 0) | (above >= nodes)][:1]:
        return [f"node {n} has parent {parents[n]}, which does not come before it"]
    wrong = [
        f"node {n} has depth {depths[n]} below one of depth {depths[parents[n]]}"
        for n in nodes[depths[1:] != depths[above] + 1][:1]
    ]
    if depth is not None and depths.max() > depth:
        wrong.append(f"node {depths.argmax()} has depth {depths.max()}, with a limit of {depth}")
    children = np.bincount(above, minlength=1)
    if children.max() > width:
        wrong.append(f"node {children.argmax()} has {children.max()} children, with a width of {width}")
    twins = Counter(zip(above.tolist(), tokens[1:].tolist(), strict=True)).most_common(1)
    wrong += [
        f"node {node} has {times} children with token {token}" for (node, token), times in twins if times > 1
    ]
    wrong += [
        f"node {n} has score {scores[n]:g}, and its parent {scores[parents[n]]:g}"
        for n in nodes[~(scores[1:] <= scores[above] + _TOLERANCE)][:1]
    ]
    return wrong
