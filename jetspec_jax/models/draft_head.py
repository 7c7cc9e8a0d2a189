"""The causal parallel draft head: all depths of a token tree from one forward pass.

One definition serves decoding and training. Through `Attend`, the head's layers attend to a context (one row
per committed token, computed by `DraftHead.context` from the target's taps) and to the block of draft slots.
The caller stores the context, in pages or in a dense differentiable array.

Source: the JetSpec paper (arXiv 2606.18394) and the layout of its published checkpoints.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.config import DraftHeadConfig
from jetspec_jax.models.decoder_layer import DecoderLayer
from jetspec_jax.models.key_table import LAYER_KEYS, Key, Skip
from jetspec_jax.models.layers import KV, Attend, RMSNorm, einsum, param
from jetspec_jax.models.selector import Selector
from pallas_kernels import shards
from pallas_kernels.quantized import Quantized


class DraftHead(nnx.Module):
    """Decoder layers over draft slots. Embeddings and logits are the target's."""

    KEYS: ClassVar[tuple[Key, ...]] = (
        Key("fc.weight", "fc", "t m -> m t"),
        Key("hidden_norm.weight", "hidden_norm.weight"),
        Key("norm.weight", "norm.weight"),
        *LAYER_KEYS,
        *Selector.KEYS,
    )
    PREFIXES: ClassVar[tuple[str, ...]] = ("",)
    SKIPPED: ClassVar[tuple[Skip, ...]] = ()
    FLOAT32: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: DraftHeadConfig, *, rngs: nnx.Rngs, dtype: jnp.dtype = jnp.dtype(jnp.float32)):
        self.config = config
        m, eps = config.layers.hidden_size, config.layers.rms_norm_eps
        self.fc = param(rngs, (len(config.tap_layers) * m, m), ("taps", "features"), dtype)
        self.hidden_norm = RMSNorm(m, eps, axis="embed", dtype=dtype)
        self.layers = nnx.List(
            [DecoderLayer(config.layers, i, rngs=rngs, dtype=dtype) for i in range(config.layers.num_layers)]
        )
        self.norm = RMSNorm(m, eps, axis="embed", dtype=dtype)
        if config.selector is not None:
            self.selector = Selector(config.selector, m, config.layers.vocab_size, rngs=rngs, dtype=dtype)

    def context_projection(self) -> Float[Array, "M L G 2 E"] | Quantized:
        """All layers' key and value projections, stacked so that one product projects the context.

        They are parts of the layers' fused projections.
        """

        def side_by_side(fused: Sequence[Array]) -> Array:
            return jnp.stack([projection[:, :, -2:] for projection in fused], axis=1)

        fused = [layer.self_attn.qkv_proj[...] for layer in self.layers]
        if not isinstance(fused[0], Quantized):
            return side_by_side(fused)
        embed, *block = fused[0].block
        values = side_by_side([projection.values for projection in fused])
        scales = side_by_side([projection.scales for projection in fused])
        return replace(fused[0], values=values, scales=scales, block=(embed, 1, *block))

    def context(
        self,
        taps: Float[Array, "B T F"],
        positions: Int[Array, "B T"],
        projection: Float[Array, "M L G 2 E"] | Quantized,
    ) -> tuple[KV, ...]:
        """Each layer's keys and values of the context, from the outputs of the tapped layers.

        All layers read the same features, without their input norm, which is for the block only. Storing keys
        and values takes a few KB per token; storing the taps would take tens.
        """
        features = einsum("btf,fm->btm", taps, self.fc[...])
        if features.shape[2] < self.config.layers.hidden_size:
            features = jnp.concatenate(list(shards.gather(features)), axis=-1)
        features = self.hidden_norm(features)
        projected = einsum("btm,mlgke->btlgke", features, projection)
        return tuple(
            layer.self_attn.finish(projected[:, :, i], positions)[1] for i, layer in enumerate(self.layers)
        )

    def __call__(
        self,
        slots: Float[Array, "B N M"],
        positions: Int[Array, "B N"],
        attend: Attend,
        *,
        remat: bool = False,
    ) -> Float[Array, "B N M"]:
        """Final-normed hidden states of the draft slots.

        ``slots`` are the target's embeddings of ``[anchor, MASK, MASK, ...]``. With ``remat`` the backward
        pass recomputes each layer's activations.
        """
        x, delta = slots, None
        for layer in self.layers:

            def run(x: Array, delta: Array | None, layer: DecoderLayer = layer) -> tuple[Array, Array | None]:
                return layer(x, delta, positions, attend)[:2]

            x, delta = (jax.checkpoint(run) if remat else run)(x, delta)
        return self.norm.after(x, delta)[0]
