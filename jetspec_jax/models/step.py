"""Step-3.7-Flash's text model: gated heads, more heads in sliding layers, and routed and shared experts.

Shapes: B sequences, N tokens, T tokens of all sequences, M model, H query heads, E head size.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.attention import Attention
from jetspec_jax.models.decoder_layer import DecoderLayer
from jetspec_jax.models.feed_forward import MLP, ExpertMLP
from jetspec_jax.models.key_table import ENDS, LAYER_KEYS, Key, Skip
from jetspec_jax.models.layers import CenteredRMSNorm, einsum, param
from jetspec_jax.models.transformer import Transformer
from pallas_kernels.expert_choice import ExpertChoice, expert_choice


class StepAttention(Attention):
    """Attention with a gate for every head."""

    NORM = CenteredRMSNorm

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        shape = (config.hidden_size, config.layers[layer].num_heads)
        self.g_proj = param(rngs, shape, ("embed", "heads"), dtype)

    def output(self, out: Float[Array, "B N H E"], x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """The output projection of the heads' outputs times the sigmoid of their gates."""
        gates = jax.nn.sigmoid(einsum("bnm,mh->bnh", x, self.g_proj[...], wide=True))
        return super().output((out * gates[..., None]).astype(out.dtype), x)


class StepExperts(ExpertMLP):
    """Routed experts, chosen with a bias, plus a shared expert."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        self.router_bias = param(rngs, (self.experts.config.count,), ("router",), dtype)
        self.shared = MLP(config, layer, rngs=rngs, dtype=dtype)

    def local(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """This device's term of the routed and shared experts' output."""
        return super().local(x) + self.shared.local(x)

    def choose(self, rows: Float[Array, "T M"]) -> ExpertChoice:
        """Each row's experts; the bias affects the choice, not the weights."""
        return expert_choice(
            self.logits(rows), routing=self.experts.config.routing, bias=self.router_bias[...]
        )


class StepLayer(DecoderLayer):
    """A pre-norm layer with gated heads; the first layers are dense."""

    NORM = CenteredRMSNorm
    ATTENTION = StepAttention
    EXPERTS = StepExperts


_MLP, _EXPERTS = "layers.{}.mlp.", "layers.{}.mlp.experts."


class Step(Transformer):
    """A Step target (``model_type`` "step3p5"), inside the multimodal "step3p7"."""

    LAYER = StepLayer
    KEYS = (
        *ENDS,
        *(key.under("model.") for key in LAYER_KEYS),
        *(
            Key(f"model.layers.{{}}.{name}", path, layout, part)
            for name, path, layout, part in (
                ("self_attn.g_proj.weight", "layers.{}.self_attn.g_proj", "m h -> h m", ...),
                ("moe.gate.weight", f"{_MLP}router", "", ...),
                ("moe.router_bias", f"{_MLP}router_bias", "", ...),
                ("moe.gate_proj.weight", f"{_EXPERTS}gate_up_proj", "e m i -> e i m", np.s_[:, :, 0]),
                ("moe.up_proj.weight", f"{_EXPERTS}gate_up_proj", "e m i -> e i m", np.s_[:, :, 1]),
                ("moe.down_proj.weight", f"{_EXPERTS}down_proj", "e i m -> e m i", ...),
                ("share_expert.gate_proj.weight", f"{_MLP}shared.gate_up_proj", "m i -> i m", np.s_[:, 0]),
                ("share_expert.up_proj.weight", f"{_MLP}shared.gate_up_proj", "m i -> i m", np.s_[:, 1]),
                ("share_expert.down_proj.weight", f"{_MLP}shared.down_proj", "i m -> m i", ...),
            )
        ),
    )
    SKIPPED = (
        Skip(r"vision_model\..*", "vision tower"),
        Skip(r"vit_large_projector\..*", "projector of images"),
        Skip(r"model\.layers\.(\d+)\..*", "layers that predict further tokens", further_layers=True),
    )
