"""Blocks that every family is made of.

Shapes: B sequences, N tokens, M model, H query heads, G KV heads, E head size.

Modules compute in the dtype of their input; norms, softmax and rotary angles are float32 inside. Every
parameter names its axes where it is made, and nothing else here knows about devices.
"""

from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.config import ModelConfig
from pallas_kernels.qkv_rotary import qkv_rotary
from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.silu_gate import silu_gate


class KV(NamedTuple):
    """Keys (after norm and rotary) and values of some tokens in one layer, each ``[B, N, G, E]``."""

    k: Float[Array, "B N G E"]
    v: Float[Array, "B N G E"]


@runtime_checkable
class Attend(Protocol):
    """Attention over whatever a layer's tokens may see: committed pages, a dense sequence, a context.

    Layers project and normalise; what lies before the block, and who sees whom inside it, is the caller's.
    """

    def __call__(
        self, layer: int, q: Float[Array, "B N H E"], kv: KV, *, scale: float, window: int | None
    ) -> Float[Array, "B N H E"]:
        """Attends with the queries of one layer."""
        ...


def einsum(spec: str, x: Array, w: Array) -> Array:
    """A product in ``x``'s dtype. float32 means all of float32: by default a GPU would round to TF32."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(spec, x, w.astype(x.dtype), precision=precision)


def param(rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str, ...], dtype: jnp.dtype) -> nnx.Param:
    """A normally initialised parameter (deviation 0.02) that names its axes."""
    return nnx.Param(0.02 * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


class RMSNorm(nnx.Module):
    """Root-mean-square norm. As Qwen3 does it, the result is cast before the weight multiplies it."""

    def __init__(self, size: int, eps: float, *, axis: str, dtype: jnp.dtype):
        """Makes a norm over the last axis of ``size`` elements, called ``axis``."""
        self.weight = nnx.Param(jnp.ones((size,), dtype), axes=(axis,))
        self.eps = eps

    def __call__(self, x: Float[Array, "*rows size"]) -> Float[Array, "*rows size"]:
        """Normalises the last axis."""
        return rms_norm(x, self.weight[...].astype(x.dtype), eps=self.eps)[0]

    def after(
        self, x: Float[Array, "*rows size"], delta: Float[Array, "*rows size"] | None
    ) -> tuple[Float[Array, "*rows size"], Float[Array, "*rows size"]]:
        """The sum of a residual stream and what a block adds to it, normalised, and as it is."""
        return rms_norm(x, self.weight[...].astype(x.dtype), eps=self.eps, delta=delta)


def rotary(
    positions: Int[Array, "B N"], size: int, theta: float
) -> tuple[Float[Array, "B N E2"], Float[Array, "B N E2"]]:
    """Cosines and sines of a rotary embedding: element i turns by ``position / theta^(2i/E)``."""
    half = size // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


class Attention(nnx.Module):
    """Grouped-query attention with per-head norms of queries and keys, before rotary.

    Queries, keys and values come from one product: at a few rows a product costs its weights' way from
    memory, and three small ones cannot keep the memory busy. The fused weight is grouped by key/value head
    (its query heads, its key, its value), so that it can still be split over devices by heads.
    """

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``'s attention."""
        m, h, g, e = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv_proj = param(rngs, (m, g, h // g + 2, e), ("embed", "kv_heads", "qkv", "head_dim"), dtype)
        self.o_proj = param(rngs, (h, e, m), ("heads", "head_dim", "embed"), dtype)
        self.q_norm = RMSNorm(e, config.rms_norm_eps, axis="head_dim", dtype=dtype)
        self.k_norm = RMSNorm(e, config.rms_norm_eps, axis="head_dim", dtype=dtype)
        self.layer, self.theta, self.eps = layer, config.rope_theta, config.rms_norm_eps
        self.scale, self.window = e**-0.5, config.windows[layer]

    def __call__(
        self, x: Float[Array, "B N M"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N M"], KV]:
        """The attention's output and the block's own keys and values."""
        q, kv = self.finish(einsum("bnm,mgre->bngre", x, self.qkv_proj[...]), positions)
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        out = attend(self.layer, q, kv, scale=self.scale, window=self.window)
        return einsum("bnhe,hem->bnm", out, self.o_proj[...]), kv

    def finish(
        self, projected: Float[Array, "B N G R2 E"], positions: Int[Array, "B N"]
    ) -> tuple[Float[Array, "B N G R E"], KV]:
        """Normed and rotated queries, as many as were projected, and what a store keeps of the rows."""
        cos, sin = rotary(positions, projected.shape[-1], self.theta)
        q, k, v = qkv_rotary(
            projected,
            self.q_norm.weight[...].astype(projected.dtype),
            self.k_norm.weight[...].astype(projected.dtype),
            cos,
            sin,
            eps=self.eps,
        )
        return q, KV(k, v)


class MLP(nnx.Module):
    """The gated feed-forward block: ``down(silu(gate(x)) * up(x))``, gate and up in one product."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes the block."""
        m, f = config.hidden_size, config.intermediate_size
        self.gate_up_proj = param(rngs, (m, 2, f), ("embed", "gate_up", "mlp"), dtype)
        self.down_proj = param(rngs, (f, m), ("mlp", "embed"), dtype)

    def __call__(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """Applies the block to every token."""
        gate_up = einsum("bnm,mkf->bnkf", x, self.gate_up_proj[...])
        return einsum("bnf,fm->bnm", silu_gate(gate_up), self.down_proj[...])


class DecoderLayer(nnx.Module):
    """A pre-norm decoder layer; the target's layers and the draft head's are the same."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``."""
        m, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(m, eps, axis="embed", dtype=dtype)
        self.self_attn = Attention(config, layer, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = RMSNorm(m, eps, axis="embed", dtype=dtype)
        self.mlp = MLP(config, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B N M"],
        delta: Float[Array, "B N M"] | None,
        positions: Int[Array, "B N"],
        attend: Attend,
    ) -> tuple[Float[Array, "B N M"], Float[Array, "B N M"], KV]:
        """Runs the layer over a residual stream of ``x + delta``.

        The sum is left to whoever reads the stream next, which is always a norm: it adds and normalises in
        one pass. ``delta`` is None before the first layer.

        Returns:
            The stream after this layer, again as two terms, and the block's own keys and values.
        """
        normed, x = self.input_layernorm.after(x, delta)
        attended, kv = self.self_attn(normed, positions, attend)
        normed, x = self.post_attention_layernorm.after(x, attended)
        return x, self.mlp(normed), kv
