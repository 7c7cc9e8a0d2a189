"""The operation as a caller sees it: checks and the choice of an implementation.

Shapes: B sequences, N nodes, D levels below the root, K candidates of a level, W of them a node's children.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from pallas_kernels.checks import refuse, wrong_arrays
from pallas_kernels.dispatch import Operation
from pallas_kernels.tree_growth import pallas_triton, reference
from pallas_kernels.tree_growth.reference import Growth

OPERATION = Operation.of(
    "tree_growth", reference.tree_growth, pallas_triton.tree_growth, pallas_triton.unsupported
)
implementations = OPERATION.implementations


def tree_growth(
    log_probs: Float32[Array, "B D *K W"],
    fan_out: Int32[Array, "B D"],
    budget: Int32[Array, "B"],
    *,
    num_nodes: int,
    one_by_one: bool = False,
    children: Int32[Array, "B D K W"] | None = None,
    implementation: str | None = None,
) -> Growth:
    """Grow one tree per sequence, best node first.

    Candidates depend on the depth alone, unless `children` gives every node a row by its own candidate.

    Until the budget is reached or nothing can grow: take the unexpanded node with the highest score,
    its sum of log-probabilities (the earliest inserted among equals), and append as its children the
    first `fan_out[b, depth]` candidates of its level, as far as the budget goes. A node whose score
    is -inf or NaN is never expanded. (The token tree of JetSpec, arXiv 2606.18394.)

    One by one: of all children that are not there yet, of whatever node, append the one with the
    highest score (that of the earliest parent among equals); one of score -inf or NaN never. A
    node's children come in the order of its level's candidates, so these are the budget's best nodes
    if each level's candidates are sorted and no log-probability is above 0.

    Two levels with two candidates each, and a budget of five nodes:

        log_probs            tree         parents  [  -1,    0,    0,     1,    1]
          -0.5  -1.0          0           ranks    [   0,    0,    1,     0,    1]
          -0.25 -2.0         / \\          depths   [   0,    1,    1,     2,    2]
                            1   2         scores   [ 0.0, -0.5, -1.0, -0.75, -2.5]
                           / \\
                          3   4

    With `children`, `log_probs[b, d, u]` is the row of nodes at depth d that are candidate u of their level
    (the root is candidate 0), and `children[b, d, u]` says which candidates of the next level are in that
    row. The same two levels, where the second candidate prefers another child, grown one by one:

        log_probs                  children      tree         parents  [  -1,    0,     1,    0,      3]
          -0.5   -1.0  (root)        0  1           0         ranks    [   0,    0,     0,    1,      1]
          -0.25  -2.0  (after 0)     0  1          / \\        depths   [   0,    1,     2,    1,      2]
          -0.125 -4.0  (after 1)     1  0         1   3       scores   [ 0.0, -0.5, -0.75, -1.0, -1.125]
                                                  |   |
                                                  2   4

    Args:
        log_probs: row d holds the candidates of nodes at depth d + 1; [B, D, W], or [B, D, K, W] with
            `children`.
        fan_out: children of an expanded node at depth d, clipped to 0..W; a node at depth D has none.
        budget: most nodes of each tree, root included, clipped to 1..N.
        num_nodes: N, at least 1; static.
        one_by_one: whether children come one by one; static.
        children: which candidate of its level each entry of `log_probs` is, clipped to 0..K-1; None where
            all nodes of a depth share a row, whose entries are the candidates in their order.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or
            there is no such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    if log_probs.ndim != 3 + (children is not None):
        axes = "[B, D, W]" if children is None else "[B, D, K, W] where children are given"
        raise ValueError(f"tree_growth: log_probs must be {axes}, got {log_probs.shape}")
    batch, levels, *_, width = log_probs.shape
    wrong = [] if num_nodes >= 1 else [f"num_nodes is {num_nodes}; the root alone is 1"]
    wrong += wrong_arrays(
        ("log_probs", log_probs, log_probs.shape, jnp.float32),
        ("fan_out", fan_out, (batch, levels), jnp.int32),
        ("budget", budget, (batch,), jnp.int32),
        ("children", children, log_probs.shape, jnp.int32),
    )
    refuse("tree_growth", wrong)
    shape = {"num_nodes": num_nodes, "one_by_one": one_by_one}
    grow = OPERATION.choose(implementation, log_probs, **shape)
    if num_nodes == 1 or log_probs.size == 0:
        return reference.roots(batch, num_nodes)
    # With a zero for depth D, one lookup answers both how many children and whether any.
    fan_out = jnp.pad(jnp.clip(fan_out, 0, width), ((0, 0), (0, 1)))
    if children is None:
        return grow(log_probs, fan_out, budget, **shape)
    children = jnp.clip(children, 0, log_probs.shape[2] - 1)
    return grow(log_probs, fan_out, budget, children=children, **shape)
