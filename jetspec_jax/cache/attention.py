"""What the layers of all that decodes know of other tokens: those committed in a slot, and their block."""

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
    """A block after the committed tokens of its slots; the block alone without stores.

    Args:
        stores: One for each layer.
        slots: The block's.
        block: The tokens.
        implementation: Of tree attention.
    """
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
        """Attends with the queries of one layer."""
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
        """What a recurrent layer starts from.

        Raises:
            ValueError: The block's tokens see all of it, which no order can express.
        """
        if self.block.kind == "full":
            raise ValueError(
                "a recurrent layer takes in a chain or a tree, no block whose tokens all see each other"
            )
        parents = self.block.parents if self.block.kind == "tree" else None
        if self.stores is None or self.slots is None:
            return History(None, None, parents)
        before = self.stores[layer].view(self.slots, self.block)
        return History(before.rows, before.state, parents)
