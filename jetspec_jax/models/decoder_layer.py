"""The pre-norm decoder layer, as most families have it; others replace its parts or the whole of it."""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.config import ModelConfig
from jetspec_jax.models.attention import Attention
from jetspec_jax.models.feed_forward import MLP, ExpertMLP
from jetspec_jax.models.layers import Attend, RMSNorm, Rows


class DecoderLayer(nnx.Module):
    """A pre-norm decoder layer; Qwen3's and the draft head's are the same.

    Attributes:
        NORM: Its norms.
        ATTENTION: Its attention.
        EXPERTS: Its feed-forward block in layers that have experts.
    """

    NORM: ClassVar[type[RMSNorm]] = RMSNorm
    ATTENTION: ClassVar[type[Attention]] = Attention
    EXPERTS: ClassVar[type[MLP | ExpertMLP]] = ExpertMLP

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``."""
        m, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = self.NORM(m, eps, axis="embed", dtype=dtype)
        self.make_mixer(config, layer, rngs=rngs, dtype=dtype)
        self.post_attention_layernorm = self.NORM(m, eps, axis="embed", dtype=dtype)
        block = MLP if config.layers[layer].experts is None else self.EXPERTS
        self.mlp = block(config, layer, rngs=rngs, dtype=dtype)

    def make_mixer(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype) -> None:
        """Makes the block that lets tokens know of each other: attention, unless a family has others."""
        self.self_attn = self.ATTENTION(config, layer, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "B N M"],
        delta: Float[Array, "B N M"] | None,
        positions: Int[Array, "B N"],
        attend: Attend,
    ) -> tuple[Float[Array, "B N M"], Float[Array, "B N M"] | None, Rows]:
        """Runs the layer over a residual stream of ``x + delta``.

        The sum is left to whoever reads the stream next, which is always a norm: it adds and normalises in
        one pass. ``delta`` is None before the first layer, and after layers that leave nothing to add.

        Returns:
            The stream after this layer, again as two terms, and what a store keeps of the block.
        """
        normed, x = self.input_layernorm.after(x, delta)
        mixed, rows = self.mix(normed, positions, attend)
        return *self.feed(x, mixed), rows

    def mix(
        self, normed: Float[Array, "B N M"], positions: Int[Array, "B N"], attend: Attend
    ) -> tuple[Float[Array, "B N M"], Rows]:
        """What the block of `make_mixer` adds to the stream, and what a store keeps of it."""
        return self.self_attn(normed, positions, attend)

    def feed(
        self, x: Float[Array, "B N M"], attended: Float[Array, "B N M"]
    ) -> tuple[Float[Array, "B N M"], Float[Array, "B N M"] | None]:
        """Adds to the stream what attention gave, and runs the feed-forward block: two terms again."""
        normed, x = self.post_attention_layernorm.after(x, attended)
        return x, self.mlp(normed)


class SandwichLayer(DecoderLayer):
    """A layer that also norms what its blocks add to the residual stream: Gemma's, from the second on.

    ``post_attention_layernorm`` is then the norm of what attention adds; the one after it has another name.
    """

    def __init__(self, config: ModelConfig, layer: int, *, rngs: nnx.Rngs, dtype: jnp.dtype):
        """Makes layer ``layer``."""
        super().__init__(config, layer, rngs=rngs, dtype=dtype)
        m, eps = config.hidden_size, config.rms_norm_eps
        self.pre_feedforward_layernorm = self.NORM(m, eps, axis="embed", dtype=dtype)
        self.post_feedforward_layernorm = self.NORM(m, eps, axis="embed", dtype=dtype)

    def feed(
        self, x: Float[Array, "B N M"], attended: Float[Array, "B N M"]
    ) -> tuple[Float[Array, "B N M"], Float[Array, "B N M"] | None]:
        """As in `DecoderLayer`, with norms of what both blocks add."""
        normed, x = self.pre_feedforward_layernorm.after(x, self.post_attention_layernorm(attended))
        return x, self.post_feedforward_layernorm(self.feed_forward(normed, x))

    def feed_forward(self, normed: Float[Array, "B N M"], x: Float[Array, "B N M"]) -> Float[Array, "B N M"]:
        """What the feed-forward blocks make of the normed stream, or of the stream as it is."""
        return self.mlp(normed)
