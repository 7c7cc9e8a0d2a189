"""A proposer that knows the true continuation and hides it among decoys.

Random models never agree with a random draft head, so their trees would be accepted no deeper than the root.
With the oracle, deep and branching paths are accepted on any model, and the nodes of an accepted path seldom
lie side by side in the node array.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp


class OracleWeights(NamedTuple):
    """The planted truth: ``truth[b, p]`` is the token that the request in slot b has at position p."""

    truth: jax.Array
    seed: jax.Array


@dataclass(frozen=True)
class OracleProposer:
    """Plants the truth at a random rank of every row; beyond the width, it is not in the tree at all.

    The rank follows the very distribution that the row claims, as with a well calibrated head: so a tree of
    some budget holds much of what it can hold. Randomness depends on the slot, the anchor's position and the
    depth alone, so a test can ask for the same rows again.
    """

    vocab_size: int
    depth: int = 9
    taps: tuple[int, ...] = ()

    def __post_init__(self):
        assert self.vocab_size.bit_count() == 1, "odd multipliers permute 0..V-1 if V is a power of two"

    def empty_state(self, num_pages, page_size, dtype):
        return ()

    def propose(self, weights, state, target, anchors, slots, depth=None):
        return self.rows(weights, slots.numbers, slots.lengths)[:, :depth]

    def prepare(self, weights):
        return weights

    def commit(self, weights, state, taps, slots, count):
        return state

    def rows(self, weights, slot, position):
        """Draft logits ``[B, D, V]`` below the anchors at ``position [B]`` in ``slot [B]``."""

        def row(slot, position, depth):
            key = jax.random.fold_in(jax.random.key(weights.seed), (slot * 4096 + position) * 64 + depth)
            u = jax.random.uniform(key, (4,))
            # Each rank's logit lies one gap below the one before, and the truth's rank is drawn to match.
            gap = 1.2 + 1.8 * u[0]
            rank = jnp.minimum((-jnp.log(u[1]) / gap).astype(jnp.int32), self.vocab_size - 1)
            multiplier, offset = 2 * (u[2:] * self.vocab_size).astype(jnp.int32) + 1
            ranks = (multiplier * jnp.arange(self.vocab_size) + offset) % self.vocab_size
            # The truth trades ranks with the decoy whose rank it got.
            true = weights.truth[slot, position + 1 + depth]
            ranks = jnp.where(ranks == rank, ranks[true], ranks)
            ranks = jnp.where(jnp.arange(self.vocab_size) == true, rank, ranks)
            return -gap * ranks

        depths = jnp.arange(self.depth)
        return jax.vmap(lambda s, p: jax.vmap(lambda d: row(s, p, d))(depths))(slot, position)


def plant(sequences, length, seed=0):
    """Weights for requests in slots 0, 1, 2, ... whose whole token sequences are known."""
    truth = [[*tokens, *[0] * (length - len(tokens))][:length] for tokens in sequences]
    return OracleWeights(jnp.asarray(truth, jnp.int32), jnp.uint32(seed))
