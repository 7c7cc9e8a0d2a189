"""Feed-forward blocks: dense, and with routed experts.

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
        added = joined(self.local(x), self.down_proj.shape[0], self.features)
        return added + self.down_bias[...].astype(x.dtype)[None, None] if self.has_bias else added

    def local(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """This device's term of the block's output, without the bias of ``down``."""
        gate_up = einsum("bnm,mkf->bnkf", x, self.gate_up_proj[...])
        if self.has_bias:
            gate_up = gate_up + self.gate_up_bias[...].astype(x.dtype)[None, None]
        return einsum(
            "bnf,fm->bnm", gated_activation(gate_up, activation=self.activation), self.down_proj[...]
        )


class RoutedExperts(nnx.Module):
    """Routed experts, in one memory layout for all families."""

    def __init__(self, hidden_size: int, experts: Experts, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        m, e, f = hidden_size, experts.count, experts.size
        self.gate_up_proj = param(rngs, (e, m, 2, f), ("expert", "embed", "gate_up", "expert_mlp"), dtype)
        self.down_proj = param(rngs, (e, f, m), ("expert", "expert_mlp", "embed"), dtype)
        if experts.biases:
            self.gate_up_bias = param(rngs, (e, 2, f), ("expert", "gate_up", "expert_mlp"), dtype)
            self.down_bias = param(rngs, (e, m), ("expert", "embed"), dtype)
        self.config = experts

    def __call__(self, rows: Float[Array, "T M"], choice: ExpertChoice) -> Float[Array, "T M"]:
        """The weighted sum of the outputs of each row's experts, as far as this device has them."""
        biases = self.config.biases
        down_bias = self.down_bias[...] if biases else None
        local_count, features = self.down_proj.shape[:2]
        if local_count < self.config.count:
            # Experts of other devices get indices out of range here, so they add nothing.
            choice = choice._replace(experts=choice.experts - local_count * shards.index(shards.EXPERT))
        if down_bias is not None and features < self.config.size:
            down_bias = jnp.where(shards.index(shards.TENSOR) == 0, down_bias, 0)
        gate_up, down = (
            weight if isinstance(weight, Narrow) else weight.astype(rows.dtype)
            for weight in (self.gate_up_proj[...], self.down_proj[...])
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
    def local_size(self) -> int:
        """Hidden features of this device's experts, summed."""
        return self.down_proj.shape[0] * self.down_proj.shape[1]

    @property
    def whole_size(self) -> int:
        """Hidden features of all experts, summed."""
        return self.config.count * self.config.size


class ExpertMLP(nnx.Module):
    """A mixture of experts: a router and routed experts."""

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        m, experts = config.hidden_size, config.layers[layer].experts
        assert experts is not None, "a layer without experts has a plain MLP"
        # One row per expert, as in files: for one token a GPU sums along rows.
        self.router = param(rngs, (experts.count, m), ("router", "embed"), dtype)
        self.experts = RoutedExperts(m, experts, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """Applies the experts to every token."""
        return joined(self.local(x), self.experts.local_size, self.experts.whole_size)

    def local(self, x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """This device's term of the block's output."""
        rows = x.reshape(-1, x.shape[-1])
        return self.experts(rows, self.choose(rows)).reshape(x.shape)

    def choose(self, rows: Float[Array, "T M"]) -> ExpertChoice:
        """Each row's experts."""
        return expert_choice(self.logits(rows), routing=self.experts.config.routing)

    def logits(self, rows: Float[Array, "T M"]) -> Float32[Array, "T E"]:
        """The router's logits, in float32: after rounding, close logits would tie."""
        return einsum("tm,em->te", rows, self.router[...], wide=True)
