"""Finds the implementation of tree attention that a case uses, for the report."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from bench.common.options import check_known
from bench.common.scene import Scene
from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.config import ModelConfig
from pallas_kernels.tree_attention import PagedPrefix, implementations, tree_attention


def implementation_of(
    config: ModelConfig, scene: Scene, rows: int, dtype: jnp.dtype, name: str | None
) -> str:
    """The implementation called ``name``, or without a name the first that supports the case.

    Args:
        config: The target; its first layer with attention decides.
        scene: The slots.
        rows: Rows of a slot's block.
        dtype: The type of the stores.
        name: One of `implementations()`, or None.

    Raises:
        ValueError: The name is unknown, or no implementation supports the case on this device.
    """
    check_known("implementation", [] if name is None else [name], implementations())
    batch, array = scene.batch, jax.ShapeDtypeStruct
    layer = next(layer for layer in config.layers if layer.recurrence is None)
    q = array((batch, rows, layer.num_heads, layer.head_dim), dtype)
    kv = array((batch, rows, layer.num_kv_heads, layer.head_dim), dtype)
    pages = array((batch * scene.pages_per_slot, PAGE_SIZE, layer.num_kv_heads, layer.head_dim), dtype)
    tables = array((batch, scene.pages_per_slot), jnp.int32)
    lengths = array((batch,), jnp.int32)
    mask = array((batch, rows, -(-rows // 32)), jnp.uint32)

    def attend(q: Array, kv: Array, mask: Array, *prefix: Array, implementation: str) -> Array:
        pages, tables, lengths = prefix
        return tree_attention(
            q,
            kv,
            kv,
            mask,
            PagedPrefix(pages, pages, tables, lengths),
            scale=1.0,
            window=layer.window,
            implementation=implementation,
        )

    reasons = []
    for candidate in implementations() if name is None else (name,):
        try:
            # Tracing is enough: an implementation raises for unsupported cases before it computes anything.
            named = functools.partial(attend, implementation=candidate)
            jax.eval_shape(named, q, kv, mask, pages, tables, lengths)
        except NotImplementedError as error:
            reasons.append(str(error))
        else:
            return candidate
    raise ValueError("; ".join(reasons))
