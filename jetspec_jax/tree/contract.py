"""What every algorithm promises, checked on values: of its plans, and of the trees that grow by them.

These checks run on the host and outside of compiled programs, where a value can be looked at and named.
"""

from collections import Counter

import jax
import numpy as np

from jetspec_jax.tree.algorithms import Algorithm, Plan, name_of
from jetspec_jax.tree.candidates import Candidates
from jetspec_jax.tree.planning import check_traceable, plan_of
from jetspec_jax.tree.routing import Routing
from jetspec_jax.tree.token_tree import NO_PARENT, ROOT_INDEX, TokenTree

# Sums of another batch, or along another path, may be rounded otherwise.
_TOLERANCE = 1e-4


def check_plan(algorithm: Algorithm, candidates: Candidates, routing: Routing) -> None:
    """Makes the plan for some candidates several times over, and looks at every value.

    Raises:
        ValueError: The plan cannot be traced or is misshapen; a cap lies outside 0..W or a bonus is not
            finite; the same candidates get another plan the second time; or a sequence gets another plan
            alone than in its batch. All that is wrong is listed, after the algorithm's name.
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
    """Looks at every node of some trees.

    Args:
        algorithm: What they were built by, for its name.
        tree: The trees.
        width: Most children of a node.
        budget: Most nodes of a tree, root included.
        depth: Of the deepest node allowed; None is no limit.

    Raises:
        ValueError: A tree has too many nodes, or none; the root is none; a parent comes after its child; a
            depth is not one more than the parent's, or too large; a node has too many children, or two with
            one token; or a score is above the parent's. All that is wrong is listed.
    """
    wrong = []
    columns = (np.asarray(x) for x in (tree.tokens, tree.parents, tree.depths, tree.scores, tree.num_nodes))
    for b, (tokens, parents, depths, scores, count) in enumerate(zip(*columns, strict=True)):
        if not 1 <= count <= min(budget, len(tokens)):
            wrong.append(f"the tree of sequence {b} has {count} nodes, with a budget of {budget}")
            continue
        found = _broken_nodes(tokens[:count], parents[:count], depths[:count], scores[:count], width, depth)
        wrong += [f"in the tree of sequence {b}, {what}" for what in found]
    _refuse(algorithm, wrong)


def _refuse(algorithm: Algorithm, wrong: list[str]) -> None:
    if wrong:
        raise ValueError(f"tree algorithm {name_of(algorithm)!r}: {'; '.join(wrong)}")


def _difference(plan: Plan, other: Plan, first: int = 0) -> str | None:
    """How the other plan differs, if it does; ``first`` is the number of its first sequence."""
    if plan.weight != other.weight:
        return f"weight is {other.weight} and not {plan.weight}"
    if (plan.bonus is None) != (other.bonus is None):
        return f"bonus is {'None' if other.bonus is None else 'an array'}, unlike before"
    for name, one, two in (("cap", plan.caps, other.caps), ("bonus", plan.bonus, other.bonus)):
        one, two = np.asarray(one, np.float64), np.asarray(two, np.float64)
        same = np.isclose(one, two, rtol=_TOLERANCE, atol=_TOLERANCE, equal_nan=True)
        for b, d in np.argwhere(~same)[:1]:
            return f"the {name} of sequence {first + b} at depth {d} is {two[b, d]:g} and not {one[b, d]:g}"
    return None


def _looks_across(algorithm: Algorithm, candidates: Candidates, routing: Routing, plan: Plan) -> str | None:
    """The first sequence that gets another plan alone than in its batch, with the difference."""
    for b in range(len(candidates.tokens)):
        own, hints = jax.tree.map(lambda rows, b=b: rows[b : b + 1], (candidates, routing))
        here = plan._replace(
            caps=plan.caps[b : b + 1], bonus=None if plan.bonus is None else plan.bonus[b : b + 1]
        )
        if difference := _difference(here, plan_of(algorithm, own, hints), b):
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
    """What is wrong with the nodes of one tree, the first of each kind; all arrays are [nodes]."""
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
