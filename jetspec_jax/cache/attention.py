"""Connects the layers of a model to the stores of committed tokens and to the block, during decoding."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Array, Float, UInt32

from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import Store
from jetspec_jax.models.layers import KV, History, Mix
from pallas_kernels.tree_attention import tree_attention


def attend_over(
    stores: Sequence[Store] | None,
    slots: Slots | None,
    block: Block,
    *,
    implementation: str | None = None,
) -> Mix:
    """Attention of a block over its slots' committed tokens and itself; without stores over itself only."""
    return _AttendOver(stores, slots, block, block.mask(), implementation)


@dataclass(frozen=True)
class _AttendOver:
    stores: Sequence[Store] | None
    slots: Slots | None
    block: Block
    mask: UInt32[Array, "B N words"]
    implementation: str | None

    def __call__(
        self,
        layer: int,
        q: Float[Array, "B N H E"],
        kv: KV,
        *,
        scale: float,
        window: int | None,
        sinks: Float[Array, "H"] | None = None,
    ) -> Float[Array, "B N H E"]:
        prefix = None
        if self.stores is not None and self.slots is not None:
            prefix = self.stores[layer].view(self.slots, self.block)
        return tree_attention(
            q,
            kv.k,
            kv.v,
            self.mask,
            prefix,
            scale=scale,
            window=window,
            depths=self.block.depths,
            sinks=sinks,
            implementation=self.implementation,
        )

    def history(self, layer: int) -> History:
        if self.block.kind == "full":
            raise ValueError(
                "a recurrent layer needs a chain or a tree, not a block whose tokens all attend to each other"
            )
        parents = self.block.parents if self.block.kind == "tree" else None
        if self.stores is None or self.slots is None:
            return History(None, None, parents)
        before = self.stores[layer].view(self.slots, self.block)
        return History(before.rows, before.state, parents)
