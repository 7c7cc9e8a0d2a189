"""Best-first growth as one Triton kernel: a program per sequence, the whole loop on the device.

The loop is sequential and its steps are tiny, so what counts is their latency. A tree lives in the
registers of one warp and is stored once, at the end; a step is two reductions over the nodes, loads
that depend on nothing but their results, and selects.

Shapes: B sequences, N nodes, D levels below the root, K candidates of a level, W of them a node's children,
L lanes.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.tree_growth.reference import Growth

_MOST_NODES = 1024

# Integers within one warp are reduced by a single instruction (`redux.sync`). More warps share the
# elementwise work but reduce through shared memory and barriers, which pays only for large trees.
_WARP = 32
_NODES_PER_WARP = 256

_ROOT = np.int32(0)  # the order of the root's score 0.0
_DONE = np.int32(-(2**31))  # the order of a node that is not to be expanded: below all scores
_NOWHERE = np.int32(2**31 - 1)  # above every place


def unsupported(log_probs: Array, *, num_nodes: int, one_by_one: bool = False) -> str | None:
    """Why the kernel cannot grow such a tree on any GPU; None if it can."""
    if num_nodes > _MOST_NODES:
        return f"{num_nodes} nodes are more than {_MOST_NODES}"
    layout = _Layout.of(log_probs, num_nodes, one_by_one)
    if layout.lanes << layout.node_shift > 2**31:
        _, levels, *candidates, width = log_probs.shape
        of_width = f" and a width of {width}" if one_by_one else ""
        of_candidates = "".join(f" and {count} candidates" for count in candidates)
        return f"{num_nodes} nodes and {levels} levels{of_width}{of_candidates} do not fit into one number"
    return None


def tree_growth(
    log_probs: Float32[Array, "B D *K W"],
    fan_out: Int32[Array, "B D1"],
    budget: Int32[Array, "B"],
    *,
    num_nodes: int,
    one_by_one: bool = False,
    children: Int32[Array, "B D K W"] | None = None,
    interpret: bool = False,
) -> Growth:
    """See `api.tree_growth`, which clips `fan_out` and appends a zero for the nodes at depth D.

    `interpret` runs the kernel on any device, slowly, for tests.
    """
    batch = log_probs.shape[0]
    layout = _Layout.of(log_probs, num_nodes, one_by_one)
    integers = jax.ShapeDtypeStruct((batch, num_nodes), jnp.int32)
    floats = jax.ShapeDtypeStruct((batch, num_nodes), jnp.float32)
    counts = jax.ShapeDtypeStruct((batch,), jnp.int32)
    grow: Any = pl.pallas_call(
        partial(_grow, layout, num_nodes, one_by_one),
        out_shape=(integers, integers, integers, floats, counts),
        grid=(batch,),
        compiler_params=plgpu.CompilerParams(num_warps=max(1, layout.lanes // _NODES_PER_WARP)),
        interpret=interpret,
        name="tree_growth",
    )
    if children is None:
        return Growth(*grow(log_probs, fan_out, budget))
    return Growth(
        *grow(log_probs, fan_out, budget, children, *_first_children(log_probs, children, one_by_one))
    )


def _first_children(
    log_probs: Float32[Array, "B D K W"], children: Int32[Array, "B D K W"], one_by_one: bool
) -> list[Float32[Array, "B D K W"]]:
    """The first entry of each child's own row, where growth is one by one; 0 for the last level's.

    Looked up beforehand: a step of the kernel would wait for two loads, the second where the first points.
    """
    if not one_by_one:
        return []
    batch, levels, *_ = children.shape
    below = jnp.pad(log_probs[:, 1:, :, 0], ((0, 0), (0, 1), (0, 0)))
    flat = children.reshape(batch, levels, -1)
    return [jnp.take_along_axis(below, flat, axis=2).reshape(children.shape)]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How many lanes hold a tree, and where a node's index, depth, rank and candidate stand in one number.

    The rank is that of the child which the node offers next. The candidate, the node's own, is in the lowest
    bits.
    """

    lanes: int  # L: N rounded up to a power of two, as Triton wants it, that fills a warp
    depth_bits: int  # hold 0..D
    rank_bits: int  # hold 0..W, or nothing, where children do not come one by one
    candidate_bits: int  # hold 0..K-1, or nothing, where all nodes of a depth share a row

    @classmethod
    def of(cls, log_probs: Array, num_nodes: int, one_by_one: bool) -> "_Layout":
        """The layout of a call."""
        _, levels, *candidates, width = log_probs.shape
        lanes = max(_WARP, pl.next_power_of_2(num_nodes))
        of_candidates = sum((count - 1).bit_length() for count in candidates)
        return cls(lanes, levels.bit_length(), width.bit_length() if one_by_one else 0, of_candidates)

    @property
    def node_shift(self) -> int:
        """Where the index begins: in the highest bits, so that the earliest node has the least number."""
        return self.depth_bits + self.depth_shift

    @property
    def depth_shift(self) -> int:
        """Where the depth begins."""
        return self.rank_bits + self.candidate_bits

    def depth(self, place: Array) -> Array:
        """The depth in a place."""
        return (place >> self.depth_shift) & ((1 << self.depth_bits) - 1)

    def rank(self, place: Array) -> Array:
        """The rank in a place."""
        place = place >> self.candidate_bits if self.candidate_bits else place
        return place & ((1 << self.rank_bits) - 1)

    def candidate(self, place: Array) -> Array:
        """The candidate in a place."""
        return place & ((1 << self.candidate_bits) - 1)

    def with_candidate(self, place: Array, candidate: Array) -> Array:
        """A place with a candidate, where places have one."""
        return place + candidate if self.candidate_bits else place


def _grow(
    layout: _Layout,
    num_nodes: int,
    one_by_one: bool,
    log_probs: Any,
    fan_out: Any,
    budgets: Any,
    *others: Any,
) -> None:
    """The kernel: grows the tree of one sequence. Arrays are references to the whole batch.

    The others are the outputs, and before them `children` where nodes have rows of their own, and what
    `_first_children` gives.
    """
    *columns, counts = others[-len(Growth._fields) :]
    own_rows = others[: -len(Growth._fields)]
    b = pl.program_id(0)
    _, levels, *_, width = log_probs.shape
    budget = jnp.minimum(budgets[b], num_nodes)
    index = jax.lax.iota(jnp.int32, layout.lanes)

    # Of every node: a score as an integer that orders alike, or _DONE (see `reference` for when), and its
    # place, which is index and depth in one number. The score is the node's own; or, one by one, that of the
    # first of its children that is not there, whose rank is then part of the place. So the best order is one
    # reduction, and the place of the earliest node that has it another; the rest follows from them.
    may_grow, best = (budget > 1) & (fan_out[b, 0] > 0), _ROOT
    if one_by_one:
        first = log_probs[b, 0, 0, 0] if own_rows else log_probs[b, 0, 0]
        may_grow, best = may_grow & (first > -jnp.inf), _order(jnp.float32(0) + first)
    best = jnp.where(may_grow, best, _DONE)
    orders = jnp.where(index == 0, best, _DONE)
    places = index << layout.node_shift
    parents = jnp.full((layout.lanes,), -1, jnp.int32)
    ranks = jnp.zeros((layout.lanes,), jnp.int32)
    scores = jnp.where(index == 0, jnp.float32(0), -jnp.inf)

    def can_add(state: tuple[Array, ...]) -> Array:
        return state[1] > _DONE

    def add(state: tuple[Array, ...]) -> tuple[Array, ...]:
        count, best, orders, places, parents, ranks, scores = state
        place = jnp.min(jnp.where(orders == best, places, _NOWHERE))
        node, depth = place >> layout.node_shift, layout.depth(place)
        row = (b, depth, layout.candidate(place)) if own_rows else (b, depth)
        if one_by_one:
            rank, added, new = layout.rank(place), 1, index == count
            new_scores = _score(best)
            sibling = scores + log_probs[*row, jnp.minimum(rank + 1, width - 1)]
            has_sibling = (rank + 1 < fan_out[b, depth]) & (sibling > -jnp.inf)
            if own_rows:
                children, firsts = own_rows
                candidate, first_child = children[*row, rank], firsts[*row, rank]
            else:
                candidate, first_child = rank, log_probs[b, jnp.minimum(depth + 1, levels - 1), 0]
            child = new_scores + first_child
            has_child = (fan_out[b, depth + 1] > 0) & (child > -jnp.inf)
            here = index == node
            orders = jnp.where(here, jnp.where(has_sibling, _order(sibling), _DONE), orders)
            orders = jnp.where(new, jnp.where(has_child, _order(child), _DONE), orders)
            places = jnp.where(here, places + (1 << layout.candidate_bits), places)
        else:
            rank, added = index - count, jnp.minimum(fan_out[b, depth], budget - count)
            new = (rank >= 0) & (rank < added)
            # Loaded for all lanes, so that the load need not wait for `added`.
            new_scores = _score(best) + log_probs[*row, jnp.clip(rank, 0, width - 1)]
            candidate = own_rows[0][*row, jnp.clip(rank, 0, width - 1)] if own_rows else rank
            expandable = new & (fan_out[b, depth + 1] > 0) & (new_scores > -jnp.inf)  # which no NaN is
            orders = jnp.where(index == node, _DONE, orders)
            orders = jnp.where(expandable, _order(new_scores), orders)
        count += added
        return (
            count,
            jnp.where(count < budget, jnp.max(orders), _DONE),
            orders,
            jnp.where(
                new,
                layout.with_candidate(
                    (index << layout.node_shift) + (depth + 1 << layout.depth_shift), candidate
                ),
                places,
            ),
            jnp.where(new, node, parents),
            jnp.where(new, candidate, ranks),
            jnp.where(new, new_scores, scores),
        )

    state = (jnp.int32(1), best, orders, places, parents, ranks, scores)
    count, _, _, places, parents, ranks, scores = jax.lax.while_loop(can_add, add, state)
    # The minimum hides that a thread could store its nodes together. For that the compiler would lay
    # out the scores, but not the places, in another order, and bring the two together through
    # shared memory in every step (seen in the machine code that JAX 0.11.2 makes for an H100).
    slot = jnp.minimum(index, num_nodes)
    for column, values in zip(columns, (parents, ranks, layout.depth(places), scores), strict=True):
        plgpu.store(column.at[b, slot], values, mask=index < num_nodes)
    counts[b] = count


def _order(scores: Array) -> Array:
    """Integers that compare as the scores do.

    Equal ones for equal scores, as no score is -0.0: sums that start at +0.0 never are.
    """
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _score(order: Array) -> Array:
    """The score that has this order."""
    bits = jnp.where(order < 0, order ^ 0x7FFFFFFF, order)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
