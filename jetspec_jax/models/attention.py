"""Grouped-query attention as in Qwen3; other families extend it in subclasses."""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.models.layers import KV, Attend, RMSNorm, einsum, joined, param
from jetspec_jax.models.rotary import rotary
from pallas_kernels.qkv_rotary import qkv_rotary

#: Axes of the fused projection of queries, keys and values.
PROJECTION_AXES = ("embed", "kv_heads", "qkv", "head_dim")


def projection(
    hidden_size: int, geometry: LayerConfig, rows: int, *, rngs: nnx.Rngs, dtype: jnp.dtype
) -> nnx.Param:
    """A fused weight with ``rows`` heads for each KV head."""
    shape = hidden_size, geometry.num_kv_heads, rows, geometry.head_dim
    return param(rngs, shape, PROJECTION_AXES, dtype)


class Attention(nnx.Module):
    """Grouped-query attention with per-head norms of queries and keys, before rotary.

    Queries, keys and values come from one product. For few rows a product is bound by reading its weights,
    and three small products cannot use the full memory bandwidth. The fused weight is grouped by KV head (its
    query heads, its key, its value), so that it can be sharded by heads.

    Attributes:
        NORM: The norm of queries and keys; None for families without.
        NORM_VALUES: Whether values are normalised too, without a weight.
    """

    NORM: ClassVar[type[RMSNorm] | None] = RMSNorm
    NORM_VALUES: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        geometry = config.layers[layer]
        m, h, e = config.hidden_size, geometry.num_heads, geometry.head_dim
        self.make_projection(m, geometry, rngs=rngs, dtype=dtype)
        self.o_proj = param(rngs, (h, e, m), ("heads", "head_dim", "embed"), dtype)
        if geometry.qkv_bias:
            g = geometry.num_kv_heads
            self.qkv_bias = param(rngs, (g, h // g + 2, e), PROJECTION_AXES[1:], dtype)
        if geometry.output_bias:
            self.o_bias = param(rngs, (m,), ("embed",), dtype)
        self.has_qkv_bias, self.has_output_bias = geometry.qkv_bias, geometry.output_bias
        if self.NORM is not None:
            self.q_norm = self.NORM(e, config.rms_norm_eps, axis="head_dim", dtype=dtype)
            self.k_norm = self.NORM(e, config.rms_norm_eps, axis="head_dim", dtype=dtype)
        self.layer, self.rope, self.eps = layer, geometry.rope, config.rms_norm_eps
        self.scale = e**-0.5 if geometry.attention_scale is None else geometry.attention_scale
        self.window, self.num_heads = geometry.window, h

    def make_projection(
        self, hidden_size: int, geometry: LayerConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ) -> None:
        """Makes the weight of `project`."""
        rows = geometry.num_heads // geometry.num_kv_heads + 2
        self.qkv_proj = projection(hidden_size, geometry, rows, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "B N M"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N M"], KV]:
        """The attention's output, and the block's keys and values."""
        out, kv = self.attended(self.project(x), positions, attend)
        return self.output(out, x), kv

    def attended(
        self, projected: Float[Array, "B N G R2 E"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N H E"], KV]:
        """The heads' outputs, and the block's keys and values."""
        q, kv = self.finish(projected, positions)
        q = q.reshape(*q.shape[:2], -1, q.shape[-1])
        out = attend(self.layer, q, kv, scale=self.scale, window=self.window, sinks=self.sink_logits())
        return out, kv

    def project(self, x: Float[Array, "B N M"]) -> Float[Array, "B N G R2 E"]:
        """Queries, keys and values in one product, with biases if there are any."""
        projected = einsum("bnm,mgre->bngre", x, self.qkv_proj[...])
        return projected + self.qkv_bias[...].astype(x.dtype)[None, None] if self.has_qkv_bias else projected

    def finish(
        self, projected: Float[Array, "B N G R2 E"], positions: Int[Array, "B N"]
    ) -> tuple[Float[Array, "B N G R E"], KV]:
        """Normed and rotated queries, if any were projected, and the keys and values for a store."""
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
        """An extra logit for each head's softmax; None if the family has no sinks."""
        return None

    def output(self, out: Float[Array, "B N H E"], x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """The output projection: the term for the residual stream. ``x`` is the layer's input."""
        added = joined(einsum("bnhe,hem->bnm", out, self.o_proj[...]), out.shape[2], self.num_heads)
        return added + self.o_bias[...].astype(added.dtype)[None, None] if self.has_output_bias else added


class PlainAttention(Attention):
    """Attention without norms of queries and keys, as in Llama."""

    NORM = None
