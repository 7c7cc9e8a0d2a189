"""The token tree as arrays, and the static sizes to which it is padded."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int, Int32

ROOT_INDEX = 0
NO_PARENT = -1

# Static numbers of nodes, root included. One program is compiled per bucket; the budget is traced.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class TokenTree:
    """A batch of token trees. Masks and paths are derived from `parents`, never stored.

    The root is node `ROOT_INDEX` and its parent is `NO_PARENT`. Parents come before their
    children, and the first `num_nodes` nodes are valid. A padding node has token 0, parent
    `NO_PARENT`, depth 0 and score -inf.

    Attributes:
        tokens: the token of each node; the root's is the anchor, the last committed token.
        parents: index of each node's parent.
        depths: distance from the root.
        scores: cumulative draft log-probability from the root, whose score is 0.
        num_nodes: valid nodes of each sequence, root included.
    """

    tokens: Int32[Array, "B N"]
    parents: Int32[Array, "B N"]
    depths: Int32[Array, "B N"]
    scores: Float32[Array, "B N"]
    num_nodes: Int32[Array, " B"]

    @property
    def valid(self) -> Bool[Array, "B N"]:
        """True for nodes, False for padding."""
        index = jnp.arange(self.tokens.shape[1], dtype=jnp.int32)
        return index[None, :] < self.num_nodes[:, None]


def bucket_for(budget: int) -> int:
    """The smallest of `BUCKETS` with at least `budget` nodes, root included.

    Raises:
        ValueError: the budget is not in 1..256.
    """
    if not 1 <= budget <= BUCKETS[-1]:
        raise ValueError(f"budget must be in 1..{BUCKETS[-1]} (nodes, root included), got {budget}")
    return next(bucket for bucket in BUCKETS if budget <= bucket)


def root_tree(root_tokens: Int[Array, " B"], num_nodes: int) -> TokenTree:
    """Trees with only a root, padded to `num_nodes`, as used for plain decoding."""
    batch = root_tokens.shape[0]
    index = jnp.arange(num_nodes, dtype=jnp.int32)[None, :]
    is_root = jnp.broadcast_to(index == ROOT_INDEX, (batch, num_nodes))
    return TokenTree(
        tokens=jnp.where(is_root, root_tokens.astype(jnp.int32)[:, None], 0),
        parents=jnp.full((batch, num_nodes), NO_PARENT, jnp.int32),
        depths=jnp.zeros((batch, num_nodes), jnp.int32),
        scores=jnp.where(is_root, jnp.float32(0), -jnp.inf),
        num_nodes=jnp.ones((batch,), jnp.int32),
    )
