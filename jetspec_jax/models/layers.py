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
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        weight = self.weight[...].astype(x.dtype)
        return y.astype(x.dtype) * jnp.expand_dims(weight, range(x.ndim - 1))


def rotate(x: Float[Array, "B N H E"], positions: Int[Array, "B N"], theta: float) -> Float[Array, "B N H E"]:
    """Rotary embedding, half-split: element i pairs with i + E/2, at angle ``position / theta^(2i/E)``."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = positions[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    cos, sin = jnp.cos(angles)[:, :, None, :], jnp.sin(angles)[:, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with per-head norms of queries and keys, before rotary."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``'s attention."""
        m, h, g, e = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = param(rngs, (m, h, e), ("embed", "heads", "head_dim"), dtype)
        self.k_proj = param(rngs, (m, g, e), ("embed", "kv_heads", "head_dim"), dtype)
        self.v_proj = param(rngs, (m, g, e), ("embed", "kv_heads", "head_dim"), dtype)
        self.o_proj = param(rngs, (h, e, m), ("heads", "head_dim", "embed"), dtype)
        self.q_norm = RMSNorm(e, config.rms_norm_eps, axis="head_dim", dtype=dtype)
        self.k_norm = RMSNorm(e, config.rms_norm_eps, axis="head_dim", dtype=dtype)
        self.layer, self.theta = layer, config.rope_theta
        self.scale, self.window = e**-0.5, config.windows[layer]

    def keys_values(self, x: Float[Array, "B N M"], positions: Int[Array, "B N"]) -> KV:
        """Keys and values of ``x``, as a store keeps them."""
        k = self.k_norm(einsum("bnm,mge->bnge", x, self.k_proj[...]))
        return KV(rotate(k, positions, self.theta), einsum("bnm,mge->bnge", x, self.v_proj[...]))

    def __call__(
        self, x: Float[Array, "B N M"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N M"], KV]:
        """The attention's output and the block's own keys and values."""
        q = self.q_norm(einsum("bnm,mhe->bnhe", x, self.q_proj[...]))
        kv = self.keys_values(x, positions)
        out = attend(self.layer, rotate(q, positions, self.theta), kv, scale=self.scale, window=self.window)
        return einsum("bnhe,hem->bnm", out, self.o_proj[...]), kv


class MLP(nnx.Module):
    """The gated feed-forward block: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes the block."""
        m, f = config.hidden_size, config.intermediate_size
        self.gate_proj = param(rngs, (m, f), ("embed", "mlp"), dtype)
        self.up_proj = param(rngs, (m, f), ("embed", "mlp"), dtype)
        self.down_proj = param(rngs, (f, m), ("mlp", "embed"), dtype)

    def __call__(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """Applies the block to every token."""
        gate = einsum("bnm,mf->bnf", x, self.gate_proj[...])
        up = einsum("bnm,mf->bnf", x, self.up_proj[...])
        return einsum("bnf,fm->bnm", jax.nn.silu(gate) * up, self.down_proj[...])


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
        self, x: Float[Array, "B N M"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N M"], KV]:
        """The residual stream after this layer and the block's own keys and values."""
        attended, kv = self.self_attn(self.input_layernorm(x), positions, attend)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv
