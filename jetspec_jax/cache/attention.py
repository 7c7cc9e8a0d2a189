"""One attention for all that decodes: the committed tokens of a slot, then a block with its own mask."""

from collections.abc import Sequence

from jaxtyping import Array, Float

from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import Store
from jetspec_jax.models.layers import KV, Attend
from pallas_kernels.tree_attention import tree_attention


def attend_over(
    stores: Sequence[Store] | None,
    slots: Slots | None,
    block: Block,
    *,
    implementation: str | None = None,
) -> Attend:
    """Attention of a block over the committed tokens of its slots; over the block alone without stores."""
    mask = block.mask()

    def attend(
        layer: int,
        q: Float[Array, "B N H E"],
        kv: KV,
        *,
        scale: float,
        window: int | None,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B N H E"]:
        prefix = None if stores is None or slots is None else stores[layer].view(slots, block)
        return tree_attention(
            q,
            kv.k,
            kv.v,
            mask,
            prefix,
            scale=scale,
            window=window,
            depths=block.depths,
            sinks=sinks,
            implementation=implementation,
        )

    return attend
