"""Ancestor masks, derived from parents: which nodes of a block attend to which."""

from collections.abc import Iterator

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, UInt32

from jetspec_jax.tree.token_tree import TokenTree

_WORD = 32


def ancestor_bits(
    parents: Int[ArrayLike, "B N"], *, max_depth: int | None = None
) -> UInt32[Array, "B N words"]:
    """Packed ancestor-or-self rows, ceil(N / 32) words each.

    Bit j % 32 of word j // 32 of row n is set iff j is n or an ancestor of n. A node with parent -1,
    such as padding, has only its own bit. Parents may come in any order.

        tree      parents            j = 0 1 2 3    word
          0       [-1, 0, 0, 1]   n=0    x . . .    0b0001
         / \\                      n=1    x x . .    0b0011
        1   2                     n=2    x . x .    0b0101
        |                         n=3    x x . x    0b1011
        3

    Args:
        parents: index of each node's parent, -1 for none.
        max_depth: static bound on the depths; None means N - 1. The number of steps is the number of
            its binary digits.
    """
    parents = jnp.asarray(parents, jnp.int32)
    num_nodes = parents.shape[1]
    node = jnp.arange(num_nodes, dtype=jnp.int32)
    words = jnp.arange(-(-num_nodes // _WORD), dtype=jnp.int32)
    self_bits = jnp.where(
        words[None, :] == node[:, None] // _WORD,
        jnp.uint32(1) << (node % _WORD).astype(jnp.uint32)[:, None],
        jnp.uint32(0),
    )
    bits = jnp.broadcast_to(self_bits[None], (*parents.shape, words.size))
    # A row with s generations, joined with the row s generations up, has 2s.
    for up in _generations(parents, num_nodes if max_depth is None else max_depth):
        above = jnp.take_along_axis(bits, up[:, :, None], axis=1, mode="fill", fill_value=0)
        bits = bits | above
    return bits


def path_sums(
    values: Float[Array, "B N"], parents: Int[Array, "B N"], *, max_depth: int
) -> Float[Array, "B N"]:
    """Sums of the values of each node and its ancestors.

    For parents [-1, 0, 0, 1] and values [0, 1, 2, 3]: [0, 1, 2, 4].

    Args:
        values: the nodes' values.
        parents: index of each node's parent, -1 for none.
        max_depth: static bound on the depths.
    """
    for up in _generations(parents, max_depth):
        values = values + jnp.take_along_axis(values, up, axis=1, mode="fill", fill_value=0)
    return values


def ancestor_mask(tree: TokenTree) -> Bool[Array, "B N N"]:
    """True at [b, n, j] iff node j is n or an ancestor of n; False for padding."""
    num_nodes = tree.parents.shape[1]
    column = jnp.arange(num_nodes, dtype=jnp.int32)
    words = ancestor_bits(tree.parents)[:, :, column // _WORD]
    bit = (words >> (column % _WORD).astype(jnp.uint32)[None, None, :]) & jnp.uint32(1)
    # Padding is no ancestor of other nodes, so clearing its rows clears its columns too.
    return (bit == 1) & tree.valid[:, :, None]


def _generations(parents: Int[Array, "B N"], max_depth: int) -> Iterator[Array]:
    """Each node's ancestor 1, 2, 4, ... generations up, until ``max_depth`` is passed.

    N means "above the root": an index past the end, for which gathers use a fill value.
    """
    num_nodes = parents.shape[1]
    up = jnp.where(parents < 0, num_nodes, parents)
    for _ in range(min(max_depth, num_nodes - 1).bit_length()):
        yield up
        up = jnp.take_along_axis(up, up, axis=1, mode="fill", fill_value=num_nodes)
