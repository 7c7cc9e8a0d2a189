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
    """A recurrence whose two projections hold, for each key head, all that goes with it.

    The weights stay as files have them; the few rows that they yield are put in order.
    """

    def make_projections(self, hidden_size: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        """Makes the weights of `project`: of a key head, q, k, R times v and R times z; R times b and a."""
        own, m = self.recurrence, hidden_size
        k, ratio = own.num_key_heads, own.num_value_heads // own.num_key_heads
        width = 2 * own.key_dim + 2 * ratio * own.value_dim
        self.in_proj_qkvz = param(rngs, (m, k, width), ("embed", "key_heads", "qkvz"), dtype)
        self.in_proj_ba = param(rngs, (m, k, 2 * ratio), ("embed", "key_heads", "ba"), dtype)

    def project(self, x: Float[Array, "B N M"]) -> Projected:
        """As of the base, in two products."""
        own, (batch, count, _) = self.recurrence, x.shape
        ratio = own.num_value_heads // own.num_key_heads
        qkvz = einsum("bnm,mkf->bnkf", x, self.in_proj_qkvz[...])
        ba = einsum("bnm,mkf->bnkf", x, self.in_proj_ba[...], wide=True)
        values = 2 * own.key_dim + ratio * own.value_dim
        *qkv, z = jnp.split(qkvz, (own.key_dim, 2 * own.key_dim, values), axis=-1)
        b, a = (part.reshape(batch, count, -1) for part in jnp.split(ba, 2, axis=-1))
        rows = jnp.concatenate([part.reshape(batch, count, -1) for part in qkv], axis=-1)
        return Projected(rows, z.reshape(batch, count, -1, own.value_dim), b, a)


class Qwen3NextLayer(HybridLayer):
    """A layer of these."""

    RECURRENCE = GroupedDeltaNet


_MIXER = "layers.{}.linear_attn."


class Qwen3Next(Transformer):
    """A Qwen3-Next target (``model_type`` "qwen3_next"). Published files hold its experts one by one."""

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
