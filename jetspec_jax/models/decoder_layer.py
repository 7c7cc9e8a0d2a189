"""The pre-norm decoder layer of most families; others override parts of it."""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.attention import Attention
from jetspec_jax.models.feed_forward import MLP, ExpertMLP
from jetspec_jax.models.layers import Attend, RMSNorm, Rows


class DecoderLayer(nnx.Module):
    """A pre-norm decoder layer, used by Qwen3 and the draft head."""

    NORM: ClassVar[type[RMSNorm]] = RMSNorm
    ATTENTION: ClassVar[type[Attention]] = Attention
    EXPERTS: ClassVar[type[MLP | ExpertMLP]] = ExpertMLP

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        m, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = self.NORM(m, eps, axis="embed", dtype=dtype)
        self.make_mixer(config, layer, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = self.NORM(m, eps, axis="embed", dtype=dtype)
        block = MLP if config.layers[layer].experts is None else self.EXPERTS
        self.mlp = block(config, layer, rngs=rngs, dtype=dtype)

    def make_mixer(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        """Makes the token mixer: attention, or in some families a recurrence."""
        self.self_attn = self.ATTENTION(config, layer, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B N M"],
        delta: Float[Array, "B N M"] | None,
        positions: Int[Array, "B N"],
        attend: Attend,
    ) -> tuple[Float[Array, "B N M"], Float[Array, "B N M"] | None, Rows]:
        """Runs the layer over the residual stream ``x + delta``.

        The stream is passed as two terms because the next reader is always a norm, which adds and normalises
        in one pass. ``delta`` is None before the first layer, and after layers that add it themselves.

        Returns the two terms after this layer, and the block's rows for a store.
        """
        normed, x = self.input_layernorm.after(x, delta)
        mixed, rows = self.mix(normed, positions, attend)
        return *self.feed(x, mixed), rows

    def mix(
        self, normed: Float[Array, "B N M"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N M"], Rows]:
        """The token mixer's term for the stream, and the block's rows for a store."""
        return self.self_attn(normed, positions, attend)

    def feed(
        self, x: Float[Array, "B N M"], attended: Float[Array, "B N M"]
    ) -> tuple[Float[Array, "B N M"], Float[Array, "B N M"] | None]:
        """Adds attention's output to the stream and runs the feed-forward block; returns two terms again."""
        normed, x = self.post_attention_layernorm.after(x, attended)
        return x, self.mlp(normed)


class SandwichLayer(DecoderLayer):
    """A layer that also norms the outputs of its blocks, as Gemma does since Gemma 2.

    ``post_attention_layernorm`` is here the norm of attention's output.
    """

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        m, eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = self.NORM(m, eps, axis="embed", dtype=dtype)
        self.post_feedforward_layernorm = self.NORM(m, eps, axis="embed", dtype=dtype)

    def feed(
        self, x: Float[Array, "B N M"], attended: Float[Array, "B N M"]
    ) -> tuple[Float[Array, "B N M"], Float[Array, "B N M"] | None]:
        """As in `DecoderLayer`, with norms of both blocks' outputs."""
        normed, x = self.pre_feedforward_layernorm.after(x, self.post_attention_layernorm(attended))
        return x, self.post_feedforward_layernorm(self.feed_forward(normed, x))

    def feed_forward(self, normed: Float[Array, "B N M"], x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """The output of the feed-forward blocks, from the normed stream and the stream ``x`` itself."""
        return self.mlp(normed)
