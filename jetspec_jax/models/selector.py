"""The selector of a draft head: scores of candidates given each possible parent.

A draft row is the same for all nodes of its depth. The selector adds a score of the pair (parent u, candidate
t) to the candidate's log-probability, gated by the row's hidden state h::

    score(t | u) = <A[u] * (H h), B[t]>

Source: the candidate selector of the DFlash 2 checkpoints, including the tensors' names. Decoding scores all
pairs of candidates; training scores rows given their true parent.

Shapes: R draft rows, P parents and K candidates of a row.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jetspec_jax.config import SelectorConfig
from jetspec_jax.models.key_table import Key
from jetspec_jax.models.layers import einsum, param
from pallas_kernels import shards


class Selector(nnx.Module):
    """Two codebooks with a row per token, as a parent and as a candidate, and the projection of the gate."""

    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("candidate_selector.hidden_projection.weight", "selector.hidden_projection", "m r -> r m"),
        Key("candidate_selector.predecessor_codebook", "selector.predecessors"),
        Key("candidate_selector.successor_codebook", "selector.successors"),
    )

    def __init__(
        self,
        config: SelectorConfig,
        hidden_size: int,
        vocab_size: int,
        *,
        rngs: nnx.Rngs,
        dtype: jnp.dtype,
    ):
        self.vocab_size = vocab_size
        codebook = (vocab_size, config.rank)
        self.hidden_projection = param(rngs, (hidden_size, config.rank), ("embed", "selector"), dtype)
        self.predecessors = param(rngs, codebook, ("vocab", "selector"), dtype)
        self.successors = param(rngs, codebook, ("vocab", "selector"), dtype)

    def __call__(
        self, hidden: Float[Array, "B R M"], parents: Int[Array, "B R P"], tokens: Int[Array, "B R K"]
    ) -> Float32[Array, "B R P K"]:
        """The score of each candidate of a row given each parent, in float32.

        On a mesh all devices get the same bits.

        ``hidden`` are the states from which the draft logits are computed.
        """
        gates = einsum("brm,mk->brk", hidden, self.hidden_projection[...], wide=True)
        befores, has_before = self._local_rows(self.predecessors[...], parents)
        afters, has_after = self._local_rows(self.successors[...], tokens)
        if shards.count() > 1:
            # Each row comes from one device, so the sum is exact. One collective needs no order of several.
            first = jnp.broadcast_to(shards.index() == 0, gates.shape[:2])
            local = ((gates, first), (befores, has_before), (afters, has_after))
            flat, restore = ravel_pytree([jnp.where(has[..., None], rows, 0) for rows, has in local])
            gates, befores, afters = restore(shards.all_sum(flat))
        pairs = befores * gates[:, :, None, :], afters
        return jnp.einsum("brpk,brtk->brpt", *pairs, precision=jax.lax.Precision.HIGHEST)

    def _local_rows(
        self, table: Float[Array, "V k"], tokens: Int[Array, "B R N"]
    ) -> tuple[Float32[Array, "B R N k"], Bool[Array, "B R N"]]:
        """The rows of tokens in float32, and for which tokens this device contributes the row to the sum."""
        size = table.shape[0]
        if size == self.vocab_size:
            given = jnp.broadcast_to(shards.index() == 0, tokens.shape)
            return table[tokens].astype(jnp.float32), given
        row = tokens - size * shards.index()
        given = (row >= 0) & (row < size)
        return table[jnp.where(given, row, 0)].astype(jnp.float32), given


def parents_of(anchors: Int[Array, "B"], tokens: Int32[Array, "B R K"]) -> Int32[Array, "B R K"]:
    """The possible parents of each row's candidates: the candidates of the row above, or the anchor.

    Three rows of two candidates below the anchor 9::

        [5 6]          [9 9]
        [7 8]    ->    [5 6]
        [4 3]          [7 8]
    """
    first = jnp.broadcast_to(anchors.astype(jnp.int32)[:, None, None], tokens[:, :1].shape)
    return jnp.concatenate([first, tokens[:, :-1]], axis=1)
