"""Best-first growth as one Triton kernel: a program per sequence, the whole loop on the device.

The loop is sequential and its steps are tiny, so what counts is their latency. A tree lives in the
registers of one warp and is stored once, at the end; a step is two reductions over the nodes, loads
that depend on nothing but their results, and selects.

Shapes: B sequences, N nodes, D levels below the root, W candidates of a level, L lanes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.dispatch import gpu_problem
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
    """Why the kernel cannot grow such a tree here; None if it can."""
    _, levels, width = log_probs.shape
    return gpu_problem() or unsupported_shape(levels, num_nodes, width if one_by_one else None)


def unsupported_shape(levels: int, num_nodes: int, width: int | None = None) -> str | None:
    """Why the kernel cannot grow such a tree on any device; None if it can. A width is for one by one."""
    if num_nodes > _MOST_NODES:
        return f"{num_nodes} nodes are more than {_MOST_NODES}"
    ranks = 0 if width is None else _rank_bits(width)
    if _lanes(num_nodes) << (_depth_bits(levels) + ranks) > 2**31:
        of_width = "" if width is None else f" and a width of {width}"
        return f"{num_nodes} nodes and {levels} levels{of_width} do not fit into one number"
    return None


def tree_growth(
    log_probs: Float32[Array, "B D W"],
    fan_out: Int32[Array, "B D1"],
    budget: Int32[Array, "B"],
    *,
    num_nodes: int,
    one_by_one: bool = False,
    interpret: bool = False,
) -> Growth:
    """See `api.tree_growth`, which clips `fan_out` and appends a zero for the nodes at depth D.

    `interpret` runs the kernel on any device, slowly, for tests.
    """
    batch, levels, width = log_probs.shape
    lanes = _lanes(num_nodes)
    kernel: Any = partial(_grow, num_nodes=num_nodes, lanes=lanes, depth_bits=_depth_bits(levels))
    if one_by_one:
        kernel = partial(
            _grow_one_by_one,
            num_nodes=num_nodes,
            lanes=lanes,
            depth_bits=_depth_bits(levels),
            rank_bits=_rank_bits(width),
        )
    integers = jax.ShapeDtypeStruct((batch, num_nodes), jnp.int32)
    floats = jax.ShapeDtypeStruct((batch, num_nodes), jnp.float32)
    counts = jax.ShapeDtypeStruct((batch,), jnp.int32)
    grow = pl.pallas_call(
        kernel,
        out_shape=(integers, integers, integers, floats, counts),
        grid=(batch,),
        compiler_params=plgpu.CompilerParams(num_warps=max(1, lanes // _NODES_PER_WARP)),
        interpret=interpret,
        name="tree_growth",
    )
    return Growth(*grow(log_probs, fan_out, budget))


def _lanes(num_nodes: int) -> int:
    """L: N rounded up to a power of two, as Triton wants it, that fills a warp."""
    return max(_WARP, pl.next_power_of_2(num_nodes))


def _depth_bits(levels: int) -> int:
    return levels.bit_length()  # holds 0..D


def _rank_bits(width: int) -> int:
    return width.bit_length()  # holds 0..W


def _grow(
    log_probs: Any,
    fan_out: Any,
    budgets: Any,
    *outputs: Any,
    num_nodes: int,
    lanes: int,
    depth_bits: int,
) -> None:
    """The kernel: grows the tree of one sequence. Arrays are references to the whole batch."""
    b = pl.program_id(0)
    width = log_probs.shape[2]
    budget = jnp.minimum(budgets[b], num_nodes)
    index = jax.lax.iota(jnp.int32, lanes)

    # Of every node: its score as an integer that orders alike, or _DONE (see `reference` for when),
    # and its place, index and depth in one number. So the best node's order is one reduction, and
    # the place of the earliest node that has it another; index, depth and score follow from them.
    best = jnp.where((budget > 1) & (fan_out[b, 0] > 0), _ROOT, _DONE)
    orders = jnp.where(index == 0, best, _DONE)
    places = index << depth_bits
    parents = jnp.full((lanes,), -1, jnp.int32)
    ranks = jnp.zeros((lanes,), jnp.int32)
    scores = jnp.where(index == 0, jnp.float32(0), -jnp.inf)

    def can_add(state: tuple[Array, ...]) -> Array:
        return state[1] > _DONE

    def expand(state: tuple[Array, ...]) -> tuple[Array, ...]:
        count, best, orders, places, parents, ranks, scores = state
        place = jnp.min(jnp.where(orders == best, places, _NOWHERE))
        node, depth = place >> depth_bits, place & ((1 << depth_bits) - 1)
        room = jnp.minimum(fan_out[b, depth], budget - count)
        child_grows = fan_out[b, depth + 1] > 0

        rank = index - count
        new = (rank >= 0) & (rank < room)
        # Loaded for all lanes, so that the load need not wait for `room`.
        child_scores = _score(best) + log_probs[b, depth, jnp.clip(rank, 0, width - 1)]

        orders = jnp.where(index == node, _DONE, orders)
        expandable = new & child_grows & (child_scores > -jnp.inf)  # which no NaN is
        orders = jnp.where(expandable, _order(child_scores), orders)
        count += room
        return (
            count,
            jnp.where(count < budget, jnp.max(orders), _DONE),
            orders,
            jnp.where(new, (index << depth_bits) + depth + 1, places),
            jnp.where(new, node, parents),
            jnp.where(new, rank, ranks),
            jnp.where(new, child_scores, scores),
        )

    state = (jnp.int32(1), best, orders, places, parents, ranks, scores)
    count, _, _, places, parents, ranks, scores = jax.lax.while_loop(can_add, expand, state)
    depths = places & ((1 << depth_bits) - 1)
    _store(b, outputs, parents, ranks, depths, scores, count, num_nodes=num_nodes)


def _grow_one_by_one(
    log_probs: Any,
    fan_out: Any,
    budgets: Any,
    *outputs: Any,
    num_nodes: int,
    lanes: int,
    depth_bits: int,
    rank_bits: int,
) -> None:
    """The kernel for growth by single children: see `reference`. Arrays are references to the whole batch."""
    b = pl.program_id(0)
    levels, width = log_probs.shape[1:]
    budget = jnp.minimum(budgets[b], num_nodes)
    index = jax.lax.iota(jnp.int32, lanes)
    node_bits = depth_bits + rank_bits

    # Of every node: the score of the first of its children that is not there, as an order, and its
    # index, its depth and that child's rank in one number.
    first = log_probs[b, 0, 0]
    may_grow = (budget > 1) & (fan_out[b, 0] > 0) & (first > -jnp.inf)
    best = jnp.where(may_grow, _order(jnp.float32(0) + first), _DONE)
    orders = jnp.where(index == 0, best, _DONE)
    places = index << node_bits
    parents = jnp.full((lanes,), -1, jnp.int32)
    ranks = jnp.zeros((lanes,), jnp.int32)
    scores = jnp.where(index == 0, jnp.float32(0), -jnp.inf)

    def can_add(state: tuple[Array, ...]) -> Array:
        return state[1] > _DONE

    def add(state: tuple[Array, ...]) -> tuple[Array, ...]:
        count, best, orders, places, parents, ranks, scores = state
        place = jnp.min(jnp.where(orders == best, places, _NOWHERE))
        node = place >> node_bits
        depth = (place >> rank_bits) & ((1 << depth_bits) - 1)
        rank = place & ((1 << rank_bits) - 1)
        score = _score(best)

        sibling = scores + log_probs[b, depth, jnp.minimum(rank + 1, width - 1)]
        has_sibling = (rank + 1 < fan_out[b, depth]) & (sibling > -jnp.inf)
        child = score + log_probs[b, jnp.minimum(depth + 1, levels - 1), 0]
        has_child = (fan_out[b, depth + 1] > 0) & (child > -jnp.inf)

        here, new = index == node, index == count
        orders = jnp.where(here, jnp.where(has_sibling, _order(sibling), _DONE), orders)
        orders = jnp.where(new, jnp.where(has_child, _order(child), _DONE), orders)
        places = jnp.where(here, places + 1, places)
        places = jnp.where(new, (index << node_bits) + ((depth + 1) << rank_bits), places)
        count += 1
        return (
            count,
            jnp.where(count < budget, jnp.max(orders), _DONE),
            orders,
            places,
            jnp.where(new, node, parents),
            jnp.where(new, rank, ranks),
            jnp.where(new, score, scores),
        )

    state = (jnp.int32(1), best, orders, places, parents, ranks, scores)
    count, _, _, places, parents, ranks, scores = jax.lax.while_loop(can_add, add, state)
    depths = (places >> rank_bits) & ((1 << depth_bits) - 1)
    _store(b, outputs, parents, ranks, depths, scores, count, num_nodes=num_nodes)


def _store(
    b: Array,
    outputs: tuple[Any, ...],
    parents: Array,
    ranks: Array,
    depths: Array,
    scores: Array,
    count: Array,
    *,
    num_nodes: int,
) -> None:
    """Writes the finished tree of one sequence."""
    index = jax.lax.iota(jnp.int32, parents.shape[0])
    *columns, counts = outputs
    # The minimum hides that a thread could store its nodes together. For that the compiler would lay
    # out the scores, but not the places, in another order, and bring the two together through
    # shared memory in every step (seen in the machine code that JAX 0.11.2 makes for an H100).
    slot = jnp.minimum(index, num_nodes)
    for column, values in zip(columns, (parents, ranks, depths, scores), strict=True):
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
