"""The block: the tokens that one forward processes after the committed ones, and their structure.

A prompt chunk is a chain, a round's nodes are a tree, and the draft head's slots are a chain or fully
connected. A block stores parents and depths; masks and positions are derived from them.
"""

from dataclasses import dataclass, field
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32, UInt32

from jetspec_jax.tree import NO_PARENT, TokenTree, ancestor_bits

Kind = Literal["chain", "tree", "full"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Block:
    """N tokens of each of B sequences; those from ``num_nodes`` on are padding.

    Attributes:
        tokens: Token ids.
        parents: Index of each token's parent in the block, -1 for none.
        depths: Distance from the first token; siblings share it, and so their position.
        num_nodes: Number of real tokens; the rest is padding. Attention masks padding from real tokens;
            recurrent layers must skip it.
        kind: In a "chain" or "tree", tokens attend to themselves and their ancestors; in "full", to all.
        max_depth: A static bound on the depths of a tree; None if there is none.
    """

    tokens: Int[Array, "B N"]
    parents: Int32[Array, "B N"]
    depths: Int32[Array, "B N"]
    num_nodes: Int32[Array, "B"]
    kind: Kind = field(metadata={"static": True})
    max_depth: int | None = field(default=None, metadata={"static": True})

    @classmethod
    def chain(
        cls,
        tokens: Int[Array, "B N"],
        kind: Kind = "chain",
        *,
        num_nodes: Int32[Array, "B"] | None = None,
    ) -> "Block":
        """A chain of tokens; ``num_nodes`` is the number of real tokens, by default all."""
        if num_nodes is None:
            num_nodes = jnp.full(tokens.shape[0], tokens.shape[1], jnp.int32)
        depths = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :], tokens.shape)
        return cls(tokens, depths + NO_PARENT, depths, num_nodes, kind)

    @classmethod
    def of_tree(cls, tree: TokenTree, max_depth: int | None = None) -> "Block":
        """The nodes of token trees."""
        return cls(tree.tokens, tree.parents, tree.depths, tree.num_nodes, "tree", max_depth)

    def positions(self, lengths: Int[Array, "B"]) -> Int[Array, "B N"]:
        """Absolute positions after ``lengths`` committed tokens."""
        return lengths[:, None] + self.depths

    def mask(self) -> UInt32[Array, "B N words"]:
        """The packed attention mask: bit j % 32 of word j // 32 of row i is set iff token i attends to j."""
        batch, rows = self.tokens.shape
        if self.kind == "tree":
            return ancestor_bits(self.parents, max_depth=self.max_depth)
        bits = causal_bits(rows)
        if self.kind == "full":
            bits = jnp.broadcast_to(bits[-1:], bits.shape)
        return jnp.broadcast_to(bits[None], (batch, *bits.shape))


def causal_bits(rows: int) -> UInt32[Array, "N words"]:
    """Packed mask of a chain: row i attends to rows 0..i.

    Three rows, one word each::

        x . .   0b001
        x x .   0b011
        x x x   0b111
    """
    row = jnp.arange(rows, dtype=jnp.int32)[:, None]
    below = row + 1 - 32 * jnp.arange(-(-rows // 32), dtype=jnp.int32)[None, :]
    # A shift by 32 is undefined, so full words are a separate case.
    partial = (jnp.uint32(1) << jnp.clip(below, 0, 31).astype(jnp.uint32)) - 1
    return jnp.where(below >= 32, jnp.uint32(0xFFFFFFFF), partial)
