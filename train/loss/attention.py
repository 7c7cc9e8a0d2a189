"""A target's attention in training: a `Mix` over dense, differentiable keys and values.

Shapes: B sequences, T tokens, H heads, G KV heads, E head size. Sequences may be packed: ``starts`` is then
the index of each token's document's first token, and documents do not attend to each other.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jetspec_jax.cache.block import causal_bits
from jetspec_jax.models.layers import KV, History
from pallas_kernels.tree_attention import tree_attention

Implementation = Literal["cudnn", "xla"]


@dataclass(frozen=True)
class CausalAttend:
    """Causal attention within documents, by JAX's `dot_product_attention`.

    Attributes:
        implementation: "cudnn", "xla", or None for the best that this device and dtype support.
        starts: For packed sequences; None is one document per sequence.
    """

    implementation: Implementation | None = None
    starts: Int[Array, "B T"] | None = None

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B T H E"],
        kv: KV,
        *,
        scale: float,
        window: int | None,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B T H E"]:
        """See `Mix`."""
        if sinks is not None:
            return with_sinks(q, kv, scale=scale, window=window, sinks=sinks, starts=self.starts)
        starts, mask = self.starts, None
        if starts is not None:
            mask = starts[:, None, :, None] == starts[:, None, None, :]
            if window is not None:
                # cuDNN supports a mask or a window, not both.
                places = jnp.arange(starts.shape[1])
                mask &= (places[:, None] - places[None, :] < window)[None, None]
        packed = starts is not None
        chosen = self.implementation or best_implementation(q.dtype, q.shape[1], packed=packed)
        # A window of w tokens holds the token itself and the w - 1 before it.
        local = None if window is None or packed else (window - 1, 0)
        with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
            return jax.nn.dot_product_attention(
                q,
                kv.k,
                kv.v,
                mask=mask,
                scale=scale,
                is_causal=True,
                local_window_size=local,
                implementation=chosen,
            )

    def history(self, layer: int) -> History:
        """Whole documents, from their starts."""
        if self.starts is None:
            return History(None, None, None)
        return History(None, None, None, self.starts == jnp.arange(self.starts.shape[1])[None, :])


def with_sinks(
    q: Float[Array, "B T H E"],
    kv: KV,
    *,
    scale: float,
    window: int | None,
    sinks: Float[Array, "H"],
    starts: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T H E"]:
    """Causal attention with one sink logit per head in the softmax, which JAX's attention does not support.

    It calls the tree attention of decoding, which has no gradient; only frozen targets have sinks.
    """
    batch, length = q.shape[:2]
    if starts is None:
        mask = jnp.broadcast_to(causal_bits(length)[None], (batch, length, -(-length // 32)))
    else:
        mask = packed_bits(starts)
    return tree_attention(q, kv.k, kv.v, mask, scale=scale, window=window, sinks=sinks)


def packed_bits(starts: Int[Array, "B T"]) -> UInt32[Array, "B T words"]:
    """Causal mask of packed documents, as bits: a token attends to itself and earlier tokens of its document.

    Starts 0 0 2 2, one word for each token::

        x . . .   0b0001
        x x . .   0b0011
        . . x .   0b0100
        . . x x   0b1100
    """
    below = causal_bits(starts.shape[1])
    others = jnp.where((starts > 0)[:, :, None], below[jnp.maximum(starts - 1, 0)], 0)
    return below[None] & ~others


def best_implementation(dtype: jnp.dtype, length: int, *, packed: bool = False) -> Implementation:
    """The fused attention of cuDNN where it runs, else the one of XLA."""
    # Its backward pass needs 16 bits and an even number of tokens.
    fits = dtype == jnp.bfloat16 and length % 2 == 0
    return "cudnn" if fits and cudnn_works(packed=packed) else "xla"


@cache
def cudnn_works(*, packed: bool = False) -> bool:
    """Whether cuDNN's fused attention compiles and runs here, forward and backward.

    Args:
        packed: Whether to test with a mask of documents and only forward: packed targets are frozen.
    """
    if jax.default_backend() != "gpu":
        return False

    def probe(q: Array, k: Array) -> Array:
        mask = jnp.ones((1, 1, q.shape[1], k.shape[1]), bool) if packed else None
        out = jax.nn.dot_product_attention(q, k, k, mask=mask, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    try:
        # This is called while a step is traced; the probe must run eagerly.
        with jax.ensure_compile_time_eval():
            q, k = (jnp.ones((1, 128, heads, 64), jnp.bfloat16) for heads in (4, 2))
            found = jax.jit(probe if packed else jax.grad(probe))(q, k)
            return bool(np.isfinite(np.asarray(found, np.float32)).all())
    except Exception as error:  # builds without cuDNN raise errors of many kinds
        kind = "attention of packed documents" if packed else "attention"
        print(f"cuDNN's {kind} is not available, XLA's is used: {str(error).splitlines()[0]}")
        return False
