"""Feed-forward blocks: dense, and of routed experts.

Shapes: B sequences, N tokens, T tokens of all sequences, M model, E experts.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Float32

from jetspec_jax.config import Experts, ModelConfig
from jetspec_jax.models.layers import einsum, joined, param
from pallas_kernels import shards
from pallas_kernels.expert_choice import ExpertChoice, expert_choice
from pallas_kernels.expert_mlp import expert_mlp
from pallas_kernels.gated_activation import gated_activation
from pallas_kernels.weights import Narrow


class MLP(nnx.Module):
    """The gated feed-forward block: ``down(activation(gate(x), up(x)))``, gate and up in one product."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``'s dense block."""
        m, f = config.hidden_size, config.layers[layer].mlp_size
        self.gate_up_proj = param(rngs, (m, 2, f), ("embed", "gate_up", "mlp"), dtype)
        self.down_proj = param(rngs, (f, m), ("mlp", "embed"), dtype)
        self.activation, self.features = config.layers[layer].activation, f
        self.has_bias = config.layers[layer].mlp_bias
        if self.has_bias:
            self.gate_up_bias = param(rngs, (2, f), ("gate_up", "mlp"), dtype)
            self.down_bias = param(rngs, (m,), ("embed",), dtype)

    def __call__(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """Applies the block to every token."""
        added = joined(self.own(x), self.down_proj.shape[0], self.features)
        return added + self.down_bias[...].astype(x.dtype)[None, None] if self.has_bias else added

    def own(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """What this device's features add to the block's output, without the bias of ``down``."""
        gate_up = einsum("bnm,mkf->bnkf", x, self.gate_up_proj[...])
        if self.has_bias:
            gate_up = gate_up + self.gate_up_bias[...].astype(x.dtype)[None, None]
        return einsum(
            "bnf,fm->bnm", gated_activation(gate_up, activation=self.activation), self.down_proj[...]
        )


class RoutedExperts(nnx.Module):
    """Gated blocks of which every token passes some. The one layout in memory, however files store them."""

    def __init__(self, hidden_size: int, experts: Experts, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes the experts."""
        m, e, f = hidden_size, experts.count, experts.size
        self.gate_up_proj = param(rngs, (e, m, 2, f), ("expert", "embed", "gate_up", "expert_mlp"), dtype)
        self.down_proj = param(rngs, (e, f, m), ("expert", "expert_mlp", "embed"), dtype)
        if experts.biases:
            self.gate_up_bias = param(rngs, (e, 2, f), ("expert", "gate_up", "expert_mlp"), dtype)
            self.down_bias = param(rngs, (e, m), ("expert", "embed"), dtype)
        self.config = experts

    def __call__(self, rows: Float[Array, "T M"], choice: ExpertChoice) -> Float[Array, "T M"]:
        """The weighted sum of what each row's experts make of it, as far as this device has them."""
        biases = self.config.biases
        down_bias = self.down_bias[...] if biases else None
        own, features = self.down_proj.shape[:2]
        if own < self.config.count:
            # The others' experts have numbers here that are none, so they add nothing.
            choice = choice._replace(experts=choice.experts - own * shards.index(shards.EXPERT))
        if down_bias is not None and features < self.config.size:
            down_bias = jnp.where(shards.index(shards.TENSOR) == 0, down_bias, 0)
        gate_up, down = (
            own if isinstance(own, Narrow) else own.astype(rows.dtype)
            for own in (self.gate_up_proj[...], self.down_proj[...])
        )
        return expert_mlp(
            rows,
            gate_up,
            down,
            *choice,
            activation=self.config.activation,
            gate_up_bias=self.gate_up_bias[...] if biases else None,
            down_bias=down_bias,
        )

    @property
    def own_size(self) -> int:
        """Features of all the experts that this device has."""
        return self.down_proj.shape[0] * self.down_proj.shape[1]

    @property
    def whole_size(self) -> int:
        """Features of all experts."""
        return self.config.count * self.config.size


class ExpertMLP(nnx.Module):
    """A router, and the experts that it chooses: the feed-forward block of a mixture of experts."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``'s router and experts."""
        m, experts = config.hidden_size, config.layers[layer].experts
        assert experts is not None, "a layer without experts has a plain MLP"
        # A row per expert, as files have it: for one token a GPU adds up along rows.
        self.router = param(rngs, (experts.count, m), ("router", "embed"), dtype)
        self.experts = RoutedExperts(m, experts, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """Applies the experts to every token."""
        return joined(self.own(x), self.experts.own_size, self.experts.whole_size)

    def own(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """What this device's experts, and its features of them, add to the block's output."""
        rows = x.reshape(-1, x.shape[-1])
        return self.experts(rows, self.choose(rows)).reshape(x.shape)

    def choose(self, rows: Float[Array, "T M"]) -> ExpertChoice:
        """Each row's experts."""
        return expert_choice(self.logits(rows), routing=self.experts.config.routing)

    def logits(self, rows: Float[Array, "T M"]) -> Float32[Array, "T E"]:
        """What the router says, in float32: where logits are rounded, near ones tie."""
        return einsum("tm,em->te", rows, self.router[...], wide=True)
