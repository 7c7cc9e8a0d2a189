"""Gemma 4: experts beside a dense block; in full layers, wide heads whose keys are also their values.

Shapes: B sequences, N tokens, T tokens of all sequences, M model, G KV heads, E head size.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.config.geometry import Experts
from jetspec_jax.models.attention import Attention, projection
from jetspec_jax.models.decoder_layer import SandwichLayer
from jetspec_jax.models.feed_forward import MLP, RoutedExperts
from jetspec_jax.models.key_table import ENDS, LAYER_KEYS, NESTED_HEAD, SANDWICH_KEYS, Key, Skip
from jetspec_jax.models.layers import WideRMSNorm, einsum, joined, param
from jetspec_jax.models.transformer import Transformer
from pallas_kernels.expert_choice import ExpertChoice, expert_choice
from pallas_kernels.rms_norm import rms_norm

# The tensors of layers that Gemma 3 lacks.
_GEMMA4_KEYS = tuple(
    Key(f"layers.{{}}.{name}", f"layers.{{}}.{path or name}", layout, part, repeated="k_proj" in name)
    for name, path, layout, part in (
        ("layer_scalar", "", "", ...),
        # In layers whose keys are values.
        ("self_attn.q_proj.weight", "self_attn.qk_proj", "m g r e -> (g r e) m", np.s_[:, :, :-1]),
        ("self_attn.k_proj.weight", "self_attn.qk_proj", "m g e -> (g e) m", np.s_[:, :, -1]),
        # In layers with experts.
        ("router.proj.weight", "router.proj", "", ...),
        ("router.scale", "", "", ...),
        ("router.per_expert_scale", "", "", ...),
        ("experts.gate_up_proj", "", "e m two i -> e (two i) m", ...),
        ("experts.down_proj", "", "e i m -> e m i", ...),
        ("post_feedforward_layernorm_1.weight", "", "", ...),
        ("pre_feedforward_layernorm_2.weight", "", "", ...),
        ("post_feedforward_layernorm_2.weight", "", "", ...),
    )
)


class Gemma4Attention(Attention):
    """Attention that also norms values, without a weight, and in full layers uses keys as values."""

    NORM = WideRMSNorm
    NORM_VALUES = True

    def make_projection(
        self, hidden_size: int, geometry: LayerConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ) -> None:
        """Makes the weight; if keys are values, it has only queries and keys, and another name."""
        self.keys_as_values = geometry.keys_as_values
        if geometry.keys_as_values:
            rows = geometry.num_heads // geometry.num_kv_heads + 1
            self.qk_proj = projection(hidden_size, geometry, rows, rngs=rngs, dtype=dtype)
        else:
            super().make_projection(hidden_size, geometry, rngs=rngs, dtype=dtype)

    def project(self, x: Float[Array, "B N M"]) -> Float[Array, "B N G R2 E"]:
        """Queries, keys and values in one product; if keys are values, the keys are repeated as values.

        They differ afterwards: keys have a norm with a weight and are rotated.
        """
        if not self.keys_as_values:
            return super().project(x)
        projected = einsum("bnm,mgre->bngre", x, self.qk_proj[...])
        return jnp.concatenate([projected, projected[..., -1:, :]], axis=-2)


class Gemma4Router(nnx.Module):
    """Chooses experts from the normed and scaled residual stream, and scales each expert's weight."""

    def __init__(self, config: ModelConfig, experts: Experts, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        m, count = config.hidden_size, experts.count
        self.proj = param(rngs, (count, m), ("router", "embed"), dtype)
        self.scale = nnx.Param(jnp.ones((m,), dtype), axes=("embed",))
        self.per_expert_scale = nnx.Param(jnp.ones((count,), dtype), axes=("router",))
        self.routing, self.eps = experts.routing, config.rms_norm_eps

    def __call__(self, rows: Float[Array, "T M"]) -> ExpertChoice:
        """Each row's experts."""
        factor = rows.shape[-1] ** -0.5
        normed, _ = rms_norm(rows, self.scale[...], eps=self.eps, weight_offset=0.0, weight_scale=factor)
        logits = einsum("tm,em->te", normed, self.proj[...], wide=True)
        return expert_choice(logits, routing=self.routing, expert_scale=self.per_expert_scale[...])


class Gemma4Layer(SandwichLayer):
    """A scaled layer that may have experts beside its dense block, with separate norms."""

    NORM = WideRMSNorm
    ATTENTION = Gemma4Attention
    EXPERTS = MLP  # every layer has a dense block; experts are beside it

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        m, eps, experts = config.hidden_size, config.rms_norm_eps, config.layers[layer].experts
        self.layer_scalar = nnx.Param(jnp.ones((1,), dtype), axes=("layer_scalar",))
        self.routed = experts is not None
        if experts is not None:
            self.router = Gemma4Router(config, experts, rngs=rngs, dtype=dtype)
            self.experts = RoutedExperts(m, experts, rngs=rngs, dtype=dtype)
            self.post_feedforward_layernorm_1 = self.NORM(m, eps, axis="embed", dtype=dtype)
            self.pre_feedforward_layernorm_2 = self.NORM(m, eps, axis="embed", dtype=dtype)
            self.post_feedforward_layernorm_2 = self.NORM(m, eps, axis="embed", dtype=dtype)

    def feed(
        self, x: Float[Array, "B N M"], attended: Float[Array, "B N M"]
    ) -> tuple[Float[Array, "B N M"], Float[Array, "B N M"] | None]:
        """As in `SandwichLayer`; then the whole stream is scaled, so there is no second term."""
        x, delta = super().feed(x, attended)
        assert delta is not None, "a sandwich layer returns two terms"
        return (x + delta) * self.layer_scalar[...].astype(x.dtype)[0], None

    def feed_forward(self, normed: Float[Array, "B N M"], x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """The dense block of the normed stream plus the experts, which norm the stream themselves."""
        if not self.routed:
            return self.mlp(normed)
        dense, rows = self.mlp.local(normed), x.reshape(-1, x.shape[-1])
        routed = self.experts(self.pre_feedforward_layernorm_2(rows), self.router(rows))
        dense, routed = joined((dense, routed), self.experts.local_size, self.experts.whole_size)
        routed = self.post_feedforward_layernorm_2(routed).reshape(x.shape)
        return self.post_feedforward_layernorm_1(dense) + routed


class Gemma4(Transformer):
    """A Gemma 4 target (``model_type`` "gemma4_text"), alone or inside the multimodal "gemma4"."""

    LAYER = Gemma4Layer
    PREFIXES = ("model.", "model.language_model.", "language_model.model.")
    SKIPPED = (
        Skip(r"(model\.)?(vision_tower|embed_vision)\..*", "vision tower"),
        Skip(r"(model\.)?(audio_tower|embed_audio)\..*", "audio tower"),
    )
    KEYS = (
        *ENDS,
        NESTED_HEAD,
        *(key.under("model.") for key in (*LAYER_KEYS, *SANDWICH_KEYS, *_GEMMA4_KEYS)),
    )
