"""Attention for training: `Attend` callbacks over dense, differentiable keys and values.

Shapes: B sequences, T tokens, A anchors of a sequence, K slots of a block, H heads, G KV heads, E head size.
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.cache.block import causal_bits
from jetspec_jax.models.layers import KV, Attend, History, Mix
from pallas_kernels.tree_attention import tree_attention

Implementation = Literal["cudnn", "xla"]


def causal_attend(implementation: Implementation | None = None) -> Mix:
    """Every token sees itself and the tokens before it, by JAX's own attention.

    Args:
        implementation: "cudnn", "xla", or None for the best that this device and dtype support.
    """
    return _CausalAttend(implementation)


@dataclass(frozen=True)
class _CausalAttend:
    implementation: Implementation | None

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
        """Attends with the queries of one layer."""
        if sinks is not None:
            return with_sinks(q, kv, scale=scale, window=window, sinks=sinks)
        chosen = self.implementation or best_implementation(q.dtype, q.shape[1])
        # A window of w tokens holds the token itself and the w - 1 before it.
        local = None if window is None else (window - 1, 0)
        with jax.default_matmul_precision("highest" if q.dtype == jnp.float32 else "default"):
            return jax.nn.dot_product_attention(
                q,
                kv.k,
                kv.v,
                scale=scale,
                is_causal=True,
                local_window_size=local,
                implementation=chosen,
            )

    def history(self, layer: int) -> History:
        """A whole sequence, from its start."""
        return History(None, None, None)


def with_sinks(
    q: Float[Array, "B T H E"],
    kv: KV,
    *,
    scale: float,
    window: int | None,
    sinks: Float[Array, "H"],
) -> Float[Array, "B T H E"]:
    """Causal attention whose softmax also counts one sink logit per head, which JAX's own does not support.

    It calls the tree attention of decoding, which has no derivative: only targets have sinks, and a target
    is frozen.
    """
    batch, length = q.shape[:2]
    mask = jnp.broadcast_to(causal_bits(length)[None], (batch, length, -(-length // 32)))
    return tree_attention(q, kv.k, kv.v, mask, scale=scale, window=window, sinks=sinks)


def best_implementation(dtype: jnp.dtype, length: int) -> Implementation:
    """The fused attention of cuDNN where it runs, else the one of XLA."""
    # Its backward pass needs 16 bits and an even number of tokens.
    return "cudnn" if dtype == jnp.bfloat16 and length % 2 == 0 and cudnn_works() else "xla"


@cache
def cudnn_works() -> bool:
    """Whether cuDNN's fused attention compiles and runs here, forward and backward."""
    if jax.default_backend() != "gpu":
        return False

    def probe(q: Array, k: Array) -> Array:
        out = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
        return jnp.sum(out.astype(jnp.float32))

    try:
        # This is called while a step is traced, and the probe must be computed at once.
        with jax.ensure_compile_time_eval():
            q, k = (jnp.ones((1, 128, heads, 64), jnp.bfloat16) for heads in (4, 2))
            gradient = jax.jit(jax.grad(probe))(q, k)
            return bool(np.isfinite(np.asarray(gradient, np.float32)).all())
    except Exception as error:  # builds without cuDNN raise errors of many kinds
        print(f"cuDNN's attention is not available, XLA's is used: {str(error).splitlines()[0]}")
        return False


def block_mask(
    anchors: Int[Array, "B A"], length: int, block_size: int, *, causal: bool
) -> Bool[Array, "B A K {length}+{block_size}"]:
    """Who sees whom: the sequence's tokens first, then the slots of the same block.

    A sequence of 4 tokens, one block of 3 slots at anchor 2 (the token at index 2 is slot 0)::

              t0 t1 t2 t3   s0 s1 s2
        s0     1  1  .  .    1  .  .
        s1     1  1  .  .    1  1  .
        s2     1  1  .  .    1  1  1

    A head that is not causal has ones in the whole right-hand square. Blocks do not see each other.
    """
    seen = jnp.arange(length)[None, None, :] < anchors[:, :, None]
    inner = jnp.tri(block_size, dtype=bool) if causal else jnp.ones((block_size, block_size), bool)
    shape = (*anchors.shape, block_size)
    return jnp.concatenate(
        [
            jnp.broadcast_to(seen[:, :, None, :], (*shape, length)),
            jnp.broadcast_to(inner[None, None, :, :], (*shape, block_size)),
        ],
        axis=-1,
    )


def block_attend(
    context: tuple[KV, ...], anchors: Int[Array, "B A"], block_size: int, *, causal: bool
) -> Attend:
    """Slots of many blocks attend to the context before their block's anchor and to their own block.

    The backward pass computes the scores again: those of a single layer take gigabytes.

    Args:
        context: Per layer, keys and values of all T tokens of the sequence.
        anchors: Index in the sequence of each block's anchor.
        block_size: Slots per block; queries come as ``[B, A * block_size, H, E]``, block after block.
        causal: Whether slot j of a block sees its slots up to j only.
    """

    def attention(q: Array, kv: KV, before: KV, scale: float) -> Array:
        b, n, h, e = q.shape
        g, length = before.k.shape[2], before.k.shape[1]
        blocks = (b, anchors.shape[1], block_size)
        precision = jax.lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
        queries = q.reshape(*blocks, g, h // g, e)
        keys, values = (x.reshape(*blocks, g, e) for x in kv)

        def product(spec: str, *operands: Array) -> Array:
            return jnp.einsum(spec, *operands, precision=precision, preferred_element_type=jnp.float32)

        # One softmax over two sets of keys, which are never copied side by side.
        mask = block_mask(anchors, length, block_size, causal=causal)[:, None, None]
        lowest = jnp.finfo(jnp.float32).min
        outer = scale * product("bakgre,btge->bgrakt", queries, before.k)
        inner = scale * product("bakgre,bajge->bgrakj", queries, keys)
        outer = jnp.where(mask[..., :length], outer, lowest)
        inner = jnp.where(mask[..., length:], inner, lowest)
        top = jnp.maximum(jnp.max(outer, axis=-1, keepdims=True), jnp.max(inner, axis=-1, keepdims=True))
        outer, inner = (jnp.exp(x - jax.lax.stop_gradient(top)) for x in (outer, inner))
        total = jnp.sum(outer, axis=-1) + jnp.sum(inner, axis=-1)
        out = product("bgrakt,btge->bakgre", outer.astype(q.dtype), before.v)
        out += product("bgrakj,bajge->bakgre", inner.astype(q.dtype), values)
        out /= jnp.moveaxis(total, (1, 2), (3, 4))[..., None]
        return out.astype(q.dtype).reshape(b, n, h, e)

    def attend(
        layer: int,
        q: Float[Array, "B N H E"],
        kv: KV,
        *,
        scale: float,
        window: int | None,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B N H E"]:
        if window is not None or sinks is not None:
            raise ValueError("a draft head has neither sliding-window layers nor sinks")
        return jax.checkpoint(partial(attention, scale=scale))(q, kv, context[layer])

    return attend
