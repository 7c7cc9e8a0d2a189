"""Grouped-query attention, as Qwen3 has it; families whose attention does more add it in a subclass."""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.models.layers import KV, Attend, RMSNorm, einsum, joined, param
from jetspec_jax.models.rotary import rotary
from pallas_kernels.qkv_rotary import qkv_rotary

#: Axes of what projects queries, keys and values.
PROJECTION_AXES = ("embed", "kv_heads", "qkv", "head_dim")


class Attention(nnx.Module):
    """Grouped-query attention with per-head norms of queries and keys, before rotary.

    Queries, keys and values come from one product: at a few rows a product costs its weights' way from
    memory, and three small ones cannot keep the memory busy. The fused weight is grouped by key/value head
    (its query heads, its key, its value), so that it can still be split over devices by heads.

    Attributes:
        NORM: Of queries and keys; None for families that have none.
        NORM_VALUES: Whether values are normalised too, with no weight.
    """

    NORM: ClassVar[type[RMSNorm] | None] = RMSNorm
    NORM_VALUES: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``'s attention."""
        own = config.layers[layer]
        m, h, e = config.hidden_size, own.num_heads, own.head_dim
        self.make_projection(m, own, rngs=rngs, dtype=dtype)
        self.o_proj = param(rngs, (h, e, m), ("heads", "head_dim", "embed"), dtype)
        if own.qkv_bias:
            g = own.num_kv_heads
            self.qkv_bias = param(rngs, (g, h // g + 2, e), PROJECTION_AXES[1:], dtype)
        if own.output_bias:
            self.o_bias = param(rngs, (m,), ("embed",), dtype)
        self.has_qkv_bias, self.has_output_bias = own.qkv_bias, own.output_bias
        if self.NORM is not None:
            self.q_norm = self.NORM(e, config.rms_norm_eps, axis="head_dim", dtype=dtype)
            self.k_norm = self.NORM(e, config.rms_norm_eps, axis="head_dim", dtype=dtype)
        self.layer, self.rope, self.eps = layer, own.rope, config.rms_norm_eps
        self.scale = e**-0.5 if own.attention_scale is None else own.attention_scale
        self.window, self.num_heads = own.window, h

    def make_projection(
        self, hidden_size: int, own: LayerConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ) -> None:
        """Makes the weight of `project`."""
        shape = hidden_size, own.num_kv_heads, own.num_heads // own.num_kv_heads + 2, own.head_dim
        self.qkv_proj = param(rngs, shape, PROJECTION_AXES, dtype)

    def __call__(
        self, x: Float[Array, "B N M"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N M"], KV]:
        """The attention's output and the block's own keys and values."""
        out, kv = self.attended(self.project(x), positions, attend)
        return self.output(out, x), kv

    def attended(
        self, projected: Float[Array, "B N G R2 E"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N H E"], KV]:
        """The heads' outputs, and the block's own keys and values."""
        q, kv = self.finish(projected, positions)
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        out = attend(self.layer, q, kv, scale=self.scale, window=self.window, sinks=self.sink_logits())
        return out, kv

    def project(self, x: Float[Array, "B N M"]) -> Float[Array, "B N G R2 E"]:
        """Queries, keys and values in one product, and their biases if there are any."""
        projected = einsum("bnm,mgre->bngre", x, self.qkv_proj[...])
        return projected + self.qkv_bias[...].astype(x.dtype)[None, None] if self.has_qkv_bias else projected

    def finish(
        self, projected: Float[Array, "B N G R2 E"], positions: Int[Array, "B N"]
    ) -> tuple[Float[Array, "B N G R E"], KV]:
        """Normed and rotated queries, as many as were projected, and what a store keeps of the rows."""
        q_weight = k_weight = offset = None
        if self.NORM is not None:
            q_weight, k_weight = (norm.weight_for(projected.dtype) for norm in (self.q_norm, self.k_norm))
            offset = self.NORM.WEIGHT_OFFSET
        q, k, v = qkv_rotary(
            projected,
            q_weight,
            k_weight,
            *rotary(positions, self.rope),
            eps=self.eps,
            weight_offset=offset,
            norm_values=self.NORM_VALUES,
        )
        return q, KV(k, v)

    def sink_logits(self) -> Float[Array, "H"] | None:
        """Logits that join each head's softmax; None for none."""
        return None

    def output(self, out: Float[Array, "B N H E"], x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """What the heads' outputs, of the layer's input ``x``, add to the residual stream."""
        added = joined(einsum("bnhe,hem->bnm", out, self.o_proj[...]), out.shape[2], self.num_heads)
        return added + self.o_bias[...].astype(added.dtype)[None, None] if self.has_output_bias else added


class PlainAttention(Attention):
    """Attention without norms of queries and keys: Llama's, and that of all who follow it."""

    NORM = None
