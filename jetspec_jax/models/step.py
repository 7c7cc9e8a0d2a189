"""Step-3.7-Flash's text model: gated heads, more of them where layers slide, and experts beside a shared one.

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
        """Makes layer ``layer``'s attention."""
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        shape = (config.hidden_size, config.layers[layer].num_heads)
        self.g_proj = param(rngs, shape, ("embed", "heads"), dtype)

    def output(self, out: Float[Array, "B N H E"], x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """The projection of the heads' outputs, each times the sigmoid of its gate."""
        gates = jax.nn.sigmoid(einsum("bnm,mh->bnh", x, self.g_proj[...], wide=True))
        return super().output((out * gates[..., None]).astype(out.dtype), x)


class StepExperts(ExpertMLP):
    """Experts that are chosen with a bias, and one that all tokens pass."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``'s router, its experts and the shared one, which is its dense block."""
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        self.router_bias = param(rngs, (self.experts.config.count,), ("router",), dtype)
        self.shared = MLP(config, layer, rngs=rngs, dtype=dtype)

    def own(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """What this device's part of the chosen experts and of the shared one adds."""
        return super().own(x) + self.shared.own(x)

    def choose(self, rows: Float[Array, "T M"]) -> ExpertChoice:
        """Each row's experts; the bias takes part in the choice, not in the weights."""
        return expert_choice(
            self.logits(rows), routing=self.experts.config.routing, bias=self.router_bias[...]
        )


class StepLayer(DecoderLayer):
    """A pre-norm layer of these, dense in the first layers."""

    NORM = CenteredRMSNorm
    ATTENTION = StepAttention
    EXPERTS = StepExperts


_MLP, _EXPERTS = "layers.{}.mlp.", "layers.{}.mlp.experts."


class Step(Transformer):
    """A Step target (``model_type`` "step3p5"), as a part of one for images, "step3p7"."""

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
