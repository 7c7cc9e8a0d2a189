"""The gated delta rule in plain JAX: the specification, the test oracle and the fallback.

Unrolled along the path to a token i, the recurrence is a system of equations for all deltas at once. With G_i
the sum of the decays on that path, D_ij = exp of that of the tokens below j down to i where j is on the path,
and 0 elsewhere::

    (I + L) delta = beta (v - e^G (k S))      L_ij = beta_i D_ij (k_i . k_j) of i's strict ancestors j
    out = e^G (q S) + (D * q k^T) delta

Parents stand before their children, so L is strictly lower triangular, for a tree as for a chain.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

#: Tokens of a chain that are solved for together; a longer one is cut into even parts of no more.
SOLVED = 128


class GatedDelta(NamedTuple):
    """What tokens read of the state, and what they would write to it."""

    out: Float[Array, "B N V E"]
    delta: Float[Array, "B N V E"]


def gated_delta(
    q: Float[Array, "B N K D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N V E"],
    decay: Float[Array, "B N V"],
    beta: Float[Array, "B N V"],
    state: Float[Array, "B V D E"] | None,
    parents: Int32[Array, "B N"] | None,
) -> GatedDelta:
    """See `api.gated_delta`, which explains the shapes and checks them."""
    batch, rows = q.shape[:2]
    if state is None:
        state = _zeros(k, v)
    if rows == 1:
        return _one(q, k, v, decay, beta, state)
    if parents is not None:
        return _together(q, k, v, decay, beta, state, _seen(parents))
    parts = -(-rows // SOLVED)
    size = -(-rows // parts)
    seen = jnp.broadcast_to(jnp.tri(size, dtype=bool)[None], (batch, size, size))
    if parts == 1:
        return _together(q, k, v, decay, beta, state, seen)

    def cut(x: Array) -> Array:
        padding = [(0, 0), (0, parts * size - rows), *[(0, 0)] * (x.ndim - 2)]
        return jnp.moveaxis(jnp.pad(x, padding).reshape(batch, parts, size, *x.shape[2:]), 1, 0)

    def joined(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, parts * size, *x.shape[3:])[:, :rows]

    def step(state: Array, part: tuple[Array, ...]) -> tuple[Array, GatedDelta]:
        q, k, v, decay, beta = part
        read = _together(q, k, v, decay, beta, state, seen)
        return _absorb(state, k, read.delta, decay), read

    _, read = jax.lax.scan(step, state, (cut(q), cut(k), cut(v), cut(decay), cut(beta)))
    return GatedDelta(*map(joined, read))


def advance(
    state: Float[Array, "B V D E"] | None,
    k: Float[Array, "B N K D"],
    delta: Float[Array, "B N V E"],
    decay: Float[Array, "B N V"],
    path: Int32[Array, "B R"],
    count: Int[Array, "B"],
) -> Float[Array, "B V D E"]:
    """See `api.advance`, which explains the shapes and checks them."""
    if state is None:
        state = _zeros(k, delta)
    # Past the end, where a gather fills in zeros, which change no state.
    nodes = jnp.where(jnp.arange(path.shape[1])[None, :] < count[:, None], path, k.shape[1])

    def along(x: Array) -> Array:
        index = nodes.reshape(*nodes.shape, *[1] * (x.ndim - 2))
        return jnp.take_along_axis(x, index, axis=1, mode="fill", fill_value=0)

    after = _absorb(state, along(k), along(delta), along(decay))
    # Adding zeros would make 0 of -0.
    return jnp.where((count > 0)[:, None, None, None], after, state)


def _one(
    q: Float[Array, "B 1 K D"],
    k: Float[Array, "B 1 K D"],
    v: Float[Array, "B 1 V E"],
    decay: Float[Array, "B 1 V"],
    beta: Float[Array, "B 1 V"],
    state: Float[Array, "B V D E"],
) -> GatedDelta:
    """A token alone: the recurrence itself, but that no state after it is made."""
    per_key = v.shape[2] // k.shape[2]
    overlap = jnp.repeat(jnp.sum(q * k, axis=-1), per_key, axis=2)[..., None]
    of_k, of_q = _read(k, q, jnp.exp(decay), state)
    delta = beta[..., None] * (v - of_k)
    return GatedDelta(of_q + overlap * delta, delta)


def _together(
    q: Float[Array, "B N K D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N V E"],
    decay: Float[Array, "B N V"],
    beta: Float[Array, "B N V"],
    state: Float[Array, "B V D E"],
    seen: Array,
) -> GatedDelta:
    """Tokens that each see themselves and their ancestors: ``seen[b, i, j]``, bool."""
    batch, rows, key_heads = k.shape[:3]
    heads = v.shape[2]
    kept = jnp.exp(_einsum("bij,bjv->biv", seen.astype(decay.dtype), decay))
    of_k, of_q = _read(k, q, kept, state)
    within = _decay_between(decay, seen)

    def weighted(gram: Float[Array, "B K N N"]) -> Float[Array, "B V N N"]:
        by_key = within.reshape(batch, key_heads, -1, rows, rows) * gram[:, :, None]
        return by_key.reshape(batch, heads, rows, rows)

    by_head = jnp.moveaxis(beta, 1, 2)[..., None]
    delta = jax.lax.linalg.triangular_solve(
        by_head * weighted(_einsum("bikd,bjkd->bkij", k, k)),
        by_head * jnp.moveaxis(v - of_k, 1, 2),
        left_side=True,
        lower=True,
        unit_diagonal=True,
    )
    out = _einsum("bvij,bvje->bive", weighted(_einsum("bikd,bjkd->bkij", q, k)), delta)
    return GatedDelta(of_q + out, jnp.moveaxis(delta, 2, 1))


def _seen(parents: Int32[Array, "B N"]) -> Array:
    """Who sees whom, bool [B, N, N]: each node itself and its ancestors.

    For parents [-1, 0, 0, 1]::

        x . . .
        x x . .
        x . x .
        x x . x
    """
    rows = parents.shape[1]
    seen = jnp.broadcast_to(jnp.eye(rows, dtype=bool)[None], (parents.shape[0], rows, rows))
    up = jnp.where(parents < 0, rows, parents)  # past the end, where a gather fills in nobody
    # Nodes that know s generations, joined with what the one s generations up knows, know 2s.
    for _ in range((rows - 1).bit_length()):
        seen |= jnp.take_along_axis(seen, up[:, :, None], axis=1, mode="fill", fill_value=False)
        up = jnp.take_along_axis(up, up, axis=1, mode="fill", fill_value=rows)
    return seen


def _decay_between(decay: Float[Array, "B N V"], seen: Array) -> Float[Array, "B V N N"]:
    """D: what of a token j's delta is left in the state after i; 0 where j is not on the path to i.

    The sum over the nodes that i sees and j does not. As the difference of two sums from the root it would
    lose all digits that those have in common, after strong decays 1e-4 of the result.
    """
    seen_as = seen.astype(decay.dtype)
    hidden = decay[..., None] * (1 - jnp.swapaxes(seen_as, 1, 2))[:, :, None, :]
    between = _einsum("bin,bnvj->bvij", seen_as, hidden)
    return jnp.exp(jnp.where(seen[:, None], between, -jnp.inf))


def _absorb(
    state: Float[Array, "B V D E"],
    k: Float[Array, "B R K D"],
    delta: Float[Array, "B R V E"],
    decay: Float[Array, "B R V"],
) -> Float[Array, "B V D E"]:
    """The state after a chain."""
    batch, rows, key_heads = k.shape[:3]
    # What is left of each token's delta: sums over the tokens after it, which are no differences either.
    later = jnp.pad(decay[:, 1:], [(0, 0), (0, 1), (0, 0)])
    later = jax.lax.cumsum(later, axis=1, reverse=True)
    left = (jnp.exp(later)[..., None] * delta).reshape(batch, rows, key_heads, -1, delta.shape[-1])
    added = _einsum("bnkd,bnkre->bkrde", k, left).reshape(state.shape)
    return jnp.exp(later[:, 0] + decay[:, 0])[..., None, None] * state + added


def _read(
    k: Float[Array, "B N K D"],
    q: Float[Array, "B N K D"],
    kept: Float[Array, "B N V"],
    state: Float[Array, "B V D E"],
) -> tuple[Float[Array, "B N V E"], Float[Array, "B N V E"]]:
    """What keys and queries find of the state before the block, which is read once for both."""
    batch, rows, key_heads = k.shape[:3]
    by_key = state.reshape(batch, key_heads, -1, *state.shape[2:])
    both = _einsum("bnkd,bkrde->bnkre", jnp.concatenate([k, q], axis=1), by_key)
    of_k, of_q = jnp.split(both.reshape(batch, 2 * rows, *state.shape[1::2]), 2, axis=1)
    return kept[..., None] * of_k, kept[..., None] * of_q


def _zeros(k: Float[Array, "B N K D"], v: Float[Array, "B N V E"]) -> Float[Array, "B V D E"]:
    """The state before a sequence."""
    return jnp.zeros((k.shape[0], v.shape[2], k.shape[3], v.shape[3]), v.dtype)


def _einsum(spec: str, *arrays: Array) -> Array:
    """A product of float32 in all of float32: a GPU's TF32 would be wrong by 1e-3."""
    return jnp.einsum(spec, *arrays, precision=jax.lax.Precision.HIGHEST)
