"""Qwen3-Next: the layers of Qwen3.5, with the recurrence's projections grouped by key head.

Shapes: B sequences, N tokens, M model, K key heads of size D, V value heads of size E, R = V / K.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jetspec_jax.models.gated_delta_net import GatedDeltaNet, Projected
from jetspec_jax.models.key_table import ENDS, Key
from jetspec_jax.models.layers import einsum, param
from jetspec_jax.models.qwen3_5 import DECAY_RATES, FURTHER_TOKENS, HYBRID_KEYS, HybridLayer
from jetspec_jax.models.transformer import Transformer


class GroupedDeltaNet(GatedDeltaNet):
    """A recurrence with two projections, whose outputs are grouped by key head.

    The weights keep the layout of the files; the projected rows, which are few, are reordered.
    """

    def make_projections(self, hidden_size: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        """Makes the weights of `project`: per key head q, k, R v and R z; and R b and R a."""
        recurrence, m = self.recurrence, hidden_size
        k, ratio = recurrence.num_key_heads, recurrence.num_value_heads // recurrence.num_key_heads
        width = 2 * recurrence.key_dim + 2 * ratio * recurrence.value_dim
        self.in_proj_qkvz = param(rngs, (m, k, width), ("embed", "key_heads", "qkvz"), dtype)
        self.in_proj_ba = param(rngs, (m, k, 2 * ratio), ("embed", "key_heads", "ba"), dtype)

    def project(self, x: Float[Array, "B N M"]) -> Projected:
        """As in the base class, in two products."""
        recurrence, (batch, count, _) = self.recurrence, x.shape
        ratio = recurrence.num_value_heads // recurrence.num_key_heads
        qkvz = einsum("bnm,mkf->bnkf", x, self.in_proj_qkvz[...])
        ba = einsum("bnm,mkf->bnkf", x, self.in_proj_ba[...], wide=True)
        values = 2 * recurrence.key_dim + ratio * recurrence.value_dim
        *qkv, z = jnp.split(qkvz, (recurrence.key_dim, 2 * recurrence.key_dim, values), axis=-1)
        b, a = (part.reshape(batch, count, -1) for part in jnp.split(ba, 2, axis=-1))
        rows = jnp.concatenate([part.reshape(batch, count, -1) for part in qkv], axis=-1)
        return Projected(rows, z.reshape(batch, count, -1, recurrence.value_dim), b, a)


class Qwen3NextLayer(HybridLayer):
    """A layer with the grouped recurrence."""

    RECURRENCE = GroupedDeltaNet


_MIXER = "layers.{}.linear_attn."


class Qwen3Next(Transformer):
    """A Qwen3-Next target (``model_type`` "qwen3_next"). Published files have one tensor per expert."""

    LAYER = Qwen3NextLayer
    FLOAT32 = (DECAY_RATES,)
    SKIPPED = (FURTHER_TOKENS,)
    KEYS = (
        *ENDS,
        *HYBRID_KEYS,
        *(
            Key(f"model.{_MIXER}{name}.weight", f"{_MIXER}{name}", "m k f -> (k f) m")
            for name in ("in_proj_qkvz", "in_proj_ba")
        ),
    )
