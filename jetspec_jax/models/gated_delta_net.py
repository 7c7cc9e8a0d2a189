"""The recurrent layers of Qwen3-Next and its successors: a gated delta net behind a short convolution.

Shapes: B sequences, N tokens, M model, K key heads of size D, V value heads of size E, C channels of the
convolution: queries, keys and values of all heads.

Source: Gated Delta Networks (Yang et al., arXiv 2412.06464).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.layers import History, RecurrentRows, RMSNorm, einsum, joined, param
from pallas_kernels.gated_delta import gated_delta

# The epsilon of the normalisation of queries and keys; it does not depend on the config.
_EPS = 1e-6
# Log-decay that clears a state exactly in float32. It is finite, because sums of log-decays are multiplied by
# zeros, which must stay zero.
_FORGET = -1e4


class Projected(NamedTuple):
    """The projections of a layer's input.

    Attributes:
        rows: Queries, keys and values, in this order.
        z: Gates of the output.
        b: Logits of the write strength of each token.
        a: Inputs of the decay.
    """

    rows: Float[Array, "B N C"]
    z: Float[Array, "B N V E"]
    b: Float32[Array, "B N V"]
    a: Float32[Array, "B N V"]


class GatedDeltaNet(nnx.Module):
    """A linear recurrence with a decaying state, updated by the delta rule."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        recurrence = config.layers[layer].recurrence
        assert recurrence is not None, "a layer without a recurrence has attention"
        m, v, e = config.hidden_size, recurrence.num_value_heads, recurrence.value_dim
        self.layer, self.recurrence = layer, recurrence
        self.make_projections(m, rngs=rngs, dtype=dtype)
        self.conv1d = param(rngs, (recurrence.channels, recurrence.kernel), ("channels", "kernel"), dtype)
        # Initialised as in transformers: some heads decay slowly, some fast.
        rates = jax.random.uniform(rngs.params(), (v,), jnp.float32, minval=0.01, maxval=16.0)
        self.A_log = nnx.Param(jnp.log(rates), axes=("value_heads",))
        self.dt_bias = nnx.Param(jnp.ones((v,), dtype), axes=("value_heads",))
        self.norm = RMSNorm(e, config.rms_norm_eps, axis="value_dim", dtype=dtype)
        self.out_proj = param(rngs, (v, e, m), ("value_heads", "value_dim", "embed"), dtype)

    def make_projections(self, hidden_size: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        """Makes the weights of `project`."""
        recurrence, m = self.recurrence, hidden_size
        v, e = recurrence.num_value_heads, recurrence.value_dim
        self.in_proj_qkv = param(rngs, (m, recurrence.channels), ("embed", "channels"), dtype)
        self.in_proj_z = param(rngs, (m, v, e), ("embed", "value_heads", "value_dim"), dtype)
        self.in_proj_ba = param(rngs, (m, 2, v), ("embed", "ba", "value_heads"), dtype)

    def project(self, x: Float[Array, "B N M"]) -> Projected:
        """The projections of the input, computed per token."""
        ba = einsum("bnm,mkv->bnkv", x, self.in_proj_ba[...], wide=True)
        return Projected(
            rows=einsum("bnm,mc->bnc", x, self.in_proj_qkv[...]),
            z=einsum("bnm,mve->bnve", x, self.in_proj_z[...]),
            b=ba[:, :, 0],
            a=ba[:, :, 1],
        )

    def __call__(
        self, x: Float[Array, "B N M"], history: History
    ) -> tuple[Float[Array, "B N M"], RecurrentRows]:
        """The layer's term for the stream, and the block's rows for a store."""
        projected = self.project(x)
        q, k, v = self.heads(self.convolve(projected.rows, history))
        bias = self.dt_bias[...].astype(jnp.float32)[None, None]
        rates = jnp.exp(self.A_log[...].astype(jnp.float32))[None, None]
        decay = -rates * jax.nn.softplus(projected.a + bias)
        if history.begins is not None:
            decay = jnp.where(history.begins[:, :, None], _FORGET, decay)
        out, delta = gated_delta(
            q, k, v, decay, jax.nn.sigmoid(projected.b), history.state, parents=history.parents
        )
        gated = self.norm(out) * jax.nn.silu(projected.z.astype(jnp.float32))
        added = einsum("bnve,vem->bnm", gated.astype(x.dtype), self.out_proj[...])
        added = joined(added, gated.shape[2], self.recurrence.num_value_heads)
        return added, RecurrentRows(projected.rows, k, delta, decay)

    def convolve(self, rows: Float[Array, "B N C"], history: History) -> Float[Array, "B N C"]:
        """The causal convolution of each channel along a token's path, then SiLU."""
        batch, count, channels = rows.shape
        taps = self.recurrence.kernel - 1
        before = history.rows
        if before is None:
            before = jnp.zeros((batch, taps, channels), rows.dtype)
        extended = jnp.concatenate([before.astype(rows.dtype), rows], axis=1)
        weight = self.conv1d[...].astype(jnp.float32)
        # index[back]: for each token, the row of its ancestor `back` steps up its path.
        index = _first_ancestors(history.parents, taps) if history.parents is not None else None
        total = rows.astype(jnp.float32) * weight[None, None, :, taps]
        behind = None if history.begins is None else _tokens_behind(history.begins)
        for back in range(1, taps + 1):
            if index is None:
                seen = extended[:, taps - back : taps - back + count]
            else:
                seen = jnp.take_along_axis(extended, index[back][:, :, None], axis=1)
            if behind is not None:
                seen = jnp.where((behind >= back)[:, :, None], seen, 0)
            total += seen.astype(jnp.float32) * weight[None, None, :, taps - back]
        return jax.nn.silu(total).astype(rows.dtype)

    def heads(
        self, rows: Float[Array, "B N C"]
    ) -> tuple[Float32[Array, "B N K D"], Float32[Array, "B N K D"], Float32[Array, "B N V E"]]:
        """Queries, normalised and scaled, keys, normalised, and values."""
        recurrence = self.recurrence
        # On a mesh the rows have only this device's key heads and their values.
        keys = rows.shape[-1] // (recurrence.channels // recurrence.num_key_heads) * recurrence.key_dim
        q, k, v = jnp.split(rows.astype(jnp.float32), (keys, 2 * keys), axis=-1)
        q, k = (_normalised(x.reshape(*x.shape[:2], -1, recurrence.key_dim)) for x in (q, k))
        return q * recurrence.key_dim**-0.5, k, v.reshape(*v.shape[:2], -1, recurrence.value_dim)


def _normalised(x: Float32[Array, "*rows D"]) -> Float32[Array, "*rows D"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + _EPS)


def _tokens_behind(begins: Bool[Array, "B N"]) -> Int[Array, "B N"]:
    """The number of tokens before each token in its sequence: begins ``x . . x .`` give 0 1 2 0 1."""
    places = jnp.broadcast_to(jnp.arange(begins.shape[1])[None, :], begins.shape)
    return places - jax.lax.cummax(jnp.where(begins, places, 0), axis=1)


def _first_ancestors(parents: Int[Array, "B N"], taps: int) -> list[Int[Array, "B N"]]:
    """For each token, the rows of itself, its parent, and so on, ``taps`` steps up.

    Rows are counted in the ``taps`` rows before the block followed by the block. Above the root, a path
    continues into the rows before the block.
    """
    batch, count = parents.shape
    above = jnp.broadcast_to(jnp.maximum(jnp.arange(taps, dtype=parents.dtype) - 1, 0)[None], (batch, taps))
    above = jnp.concatenate([above, parents + taps], axis=1)
    block = jnp.arange(taps, taps + count, dtype=parents.dtype)
    index = [jnp.broadcast_to(block[None], (batch, count))]
    for _ in range(taps):
        index.append(jnp.take_along_axis(above, index[-1], axis=1))
    return index
