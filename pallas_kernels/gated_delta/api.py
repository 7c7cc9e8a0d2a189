"""The public operation: it checks its arguments and chooses an implementation.

Shapes: B sequences, N tokens of a block, K key heads of size D, V value heads of size E, R tokens of a path.
V is a multiple of K: V / K value heads, side by side, share a key head.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.checks import refuse, wrong_arrays
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.gated_delta import reference
from pallas_kernels.gated_delta.reference import GatedDelta

OPERATION = Operation("gated_delta", {"xla": Implementation(reference.gated_delta)})
implementations = OPERATION.implementations

#: Nodes of the largest tree: all of it is one system of equations.
MOST_NODES = 256
# float64 is for tests, and only where JAX is told to have it.
_DTYPES = (jnp.float32, jnp.float64)


def gated_delta(
    q: Float[Array, "B N K D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N V E"],
    decay: Float[Array, "B N V"],
    beta: Float[Array, "B N V"],
    state: Float[Array, "B V D E"] | None = None,
    *,
    parents: Int32[Array, "B N"] | None = None,
    implementation: str | None = None,
) -> GatedDelta:
    """The output of every token of a chain or a tree, read from the state after the token's path.

    With S the state after a token's parent, each value head computes `S exp(decay)`, adds `k delta^T` to it,
    where `delta = beta (v - S^T k)`, and reads `S^T q`. The given state does not change; `advance` computes
    the state after a path. Products are in full float32 on every device; float64 stays float64.

    Args:
        q: queries, normalised and scaled.
        k: keys, normalised.
        v: values.
        decay: logarithm of what the state is multiplied with at each token; never positive.
        beta: how much of the difference is written.
        state: before the first token; None is zero.
        parents: index of each token's parent, which stands before it, -1 for none. None is a chain, of any
            length; a tree has at most `MOST_NODES` nodes.
        implementation: one of `implementations()`; None picks the best for the case.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), value heads do
            not share key heads evenly, a tree is too large, or there is no such implementation.
        NotImplementedError: the named implementation does not support the case or the device.
    """
    if q.ndim != 4 or v.ndim != 4 or q.dtype not in _DTYPES:
        raise ValueError(
            "gated_delta: q must be float32 [B, N, K, D] and v [B, N, V, E], got"
            f" {q.dtype} {q.shape} and {v.dtype} {v.shape}"
        )
    (batch, rows, key_heads, key_size), (heads, size) = q.shape, v.shape[2:]
    wrong = wrong_arrays(
        ("q", q, q.shape, q.dtype),
        ("k", k, q.shape, q.dtype),
        ("v", v, (batch, rows, heads, size), q.dtype),
        ("decay", decay, (batch, rows, heads), q.dtype),
        ("beta", beta, (batch, rows, heads), q.dtype),
        ("state", state, (batch, heads, key_size, size), q.dtype),
        ("parents", parents, (batch, rows), jnp.int32),
        empty=False,
    )
    if key_heads and heads % key_heads:
        wrong.append(f"{heads} value heads are no multiple of {key_heads} key heads")
    if parents is not None and rows > MOST_NODES:
        wrong.append(f"a tree of {rows} nodes, at most {MOST_NODES} are possible")
    refuse("gated_delta", wrong)
    arrays = q, k, v, decay, beta, state, parents
    return OPERATION.choose(implementation, *arrays)(*arrays)


def advance(
    state: Float[Array, "B V D E"] | None,
    k: Float[Array, "B N K D"],
    delta: Float[Array, "B N V E"],
    decay: Float[Array, "B N V"],
    path: Int32[Array, "B R"],
    count: Int[Array, "B"],
) -> Float[Array, "B V D E"]:
    """The state after the first ``count[b]`` nodes of each path.

    Args:
        state: what `gated_delta` was given; None is zero.
        k: likewise.
        delta: what it returned.
        decay: what it was given.
        path: nodes from a root to a descendant, each the parent of the next; after ``count`` there may be
            anything.
        count: at most R; 0 keeps a state bit for bit.

    Raises:
        ValueError: an argument is misshapen or of the wrong dtype (all of them are listed), or value heads do
            not share key heads evenly.
    """
    if k.ndim != 4 or delta.ndim != 4 or path.ndim != 2 or k.dtype not in _DTYPES:
        raise ValueError(
            "advance: k must be float32 [B, N, K, D], delta [B, N, V, E] and path [B, R], got"
            f" {k.dtype} {k.shape}, {delta.dtype} {delta.shape} and {path.dtype} {path.shape}"
        )
    (batch, rows, key_heads, key_size), (heads, size) = k.shape, delta.shape[2:]
    wrong = wrong_arrays(
        ("state", state, (batch, heads, key_size, size), k.dtype),
        ("k", k, k.shape, k.dtype),
        ("delta", delta, (batch, rows, heads, size), k.dtype),
        ("decay", decay, (batch, rows, heads), k.dtype),
        ("path", path, (batch, path.shape[1]), jnp.int32),
        ("count", count, (batch,), jnp.integer),
        empty=False,
    )
    if key_heads and heads % key_heads:
        wrong.append(f"{heads} value heads are no multiple of {key_heads} key heads")
    refuse("advance", wrong)
    return reference.advance(state, k, delta, decay, path, count)
