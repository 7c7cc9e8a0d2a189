"""Qwen3.5 and its successors: recurrent layers interleaved with gated attention.

Shapes: B sequences, N tokens, M model, H query heads, G KV heads, R = H / G, E head size.
"""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.models.attention import Attention, projection
from jetspec_jax.models.decoder_layer import DecoderLayer
from jetspec_jax.models.feed_forward import MLP, ExpertMLP
from jetspec_jax.models.gated_delta_net import GatedDeltaNet
from jetspec_jax.models.key_table import ENDS, EXPERT_KEYS, LAYER_KEYS, Key, Skip
from jetspec_jax.models.layers import KV, Attend, CenteredRMSNorm, Mix, Rows, einsum, param
from jetspec_jax.models.transformer import Transformer


class GatedAttention(Attention):
    """Attention with a gate for each element of a head's output, projected together with the query."""

    NORM = CenteredRMSNorm

    def make_projection(
        self, hidden_size: int, geometry: LayerConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype
    ) -> None:
        """Makes a weight with queries and gates interleaved, before the key and the value."""
        rows = 2 * (geometry.num_heads // geometry.num_kv_heads) + 2
        self.qkv_proj = projection(hidden_size, geometry, rows, rngs=rngs, dtype=dtype)

    def attended(
        self, projected: Float[Array, "B N G R2 E"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N H E"], KV]:
        """The heads' outputs, times the sigmoid of their gates, and the block's keys and values."""
        queries, gates = projected[..., :-2:2, :], projected[..., 1:-2:2, :]
        projected = jnp.concatenate([queries, projected[..., -2:, :]], axis=-2)
        out, kv = super().attended(projected, positions, attend)
        gated = out * jax.nn.sigmoid(gates.reshape(out.shape).astype(jnp.float32))
        return gated.astype(out.dtype), kv


class SharedExpertMLP(ExpertMLP):
    """Routed experts plus a shared expert, which is weighted by a gate."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        self.shared = MLP(config, layer, rngs=rngs, dtype=dtype)
        self.shared_gate = param(rngs, (config.hidden_size,), ("embed",), dtype)

    def local(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """This device's term of the routed and shared experts' output."""
        gates = jax.nn.sigmoid(einsum("bnm,m->bn", x, self.shared_gate[...], wide=True))
        return super().local(x) + (gates[:, :, None] * self.shared.local(x)).astype(x.dtype)


class HybridLayer(DecoderLayer):
    """A pre-norm layer with a recurrence or attention."""

    NORM = CenteredRMSNorm
    ATTENTION = GatedAttention
    EXPERTS = SharedExpertMLP
    RECURRENCE: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet

    def make_mixer(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        """Makes the recurrence or the attention."""
        self.recurrent = config.layers[layer].recurrence is not None
        if self.recurrent:
            self.linear_attn = self.RECURRENCE(config, layer, rngs=rngs, dtype=dtype)
        else:
            super().make_mixer(config, layer, rngs=rngs, dtype=dtype)

    def mix(
        self, normed: Float[Array, "B N M"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N M"], Rows]:
        """The term of the recurrence or the attention for the stream, and the block's rows for a store."""
        if not self.recurrent:
            return super().mix(normed, positions, attend)
        assert isinstance(attend, Mix), "a recurrent layer needs the history before its block"
        return self.linear_attn(normed, attend.history(self.linear_attn.layer))


_MIXER, _MLP = "layers.{}.linear_attn.", "layers.{}.mlp."
#: Logarithms of the states' decay rates, float32 in all files.
DECAY_RATES = f"{_MIXER}A_log"

#: The entries that all these families share, in addition to `ENDS`.
HYBRID_KEYS = tuple(
    key.under("model.")
    for key in (
        *LAYER_KEYS,
        Key(f"{_MIXER}conv1d.weight", f"{_MIXER}conv1d", "c k -> c () k"),
        Key(DECAY_RATES, DECAY_RATES),
        Key(f"{_MIXER}dt_bias", f"{_MIXER}dt_bias"),
        Key(f"{_MIXER}norm.weight", f"{_MIXER}norm.weight"),
        Key(f"{_MIXER}out_proj.weight", f"{_MIXER}out_proj", "v e m -> m (v e)"),
        Key(f"{_MLP}shared_expert.gate_proj.weight", f"{_MLP}shared.gate_up_proj", "m i -> i m", np.s_[:, 0]),
        Key(f"{_MLP}shared_expert.up_proj.weight", f"{_MLP}shared.gate_up_proj", "m i -> i m", np.s_[:, 1]),
        Key(f"{_MLP}shared_expert.down_proj.weight", f"{_MLP}shared.down_proj", "i m -> m i"),
        Key(f"{_MLP}shared_expert_gate.weight", f"{_MLP}shared_gate", "m -> () m"),
        *EXPERT_KEYS,
    )
)

#: Tensors for multi-token prediction, which files of all these families may have.
FURTHER_TOKENS = Skip(r"mtp\..*", "layers that predict further tokens")


class Qwen3_5(Transformer):
    """A Qwen3.5 target, dense or with experts (``model_type`` "qwen3_5_text" and "qwen3_5_moe_text").

    Alone or inside the multimodal "qwen3_5" and "qwen3_5_moe". Published files have fused experts;
    transformers writes one tensor per expert.
    """

    LAYER = HybridLayer
    FLOAT32 = (DECAY_RATES,)
    PREFIXES = ("model.", "model.language_model.")
    SKIPPED = (FURTHER_TOKENS, Skip(r"(model\.)?visual\..*", "vision tower"))
    KEYS = (
        *ENDS,
        *HYBRID_KEYS,
        *(
            Key(f"model.{_MIXER}{name}.weight", f"{_MIXER}{path}", layout, part)
            for name, path, layout, part in (
                ("in_proj_qkv", "in_proj_qkv", "m c -> c m", ...),
                ("in_proj_z", "in_proj_z", "m v e -> (v e) m", ...),
                ("in_proj_b", "in_proj_ba", "m v -> v m", np.s_[:, 0]),
                ("in_proj_a", "in_proj_ba", "m v -> v m", np.s_[:, 1]),
            )
        ),
    )
