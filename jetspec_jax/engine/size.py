"""How much an engine holds at a time, and whether a device can hold that.

Shapes: B slots, N nodes, D draft depth, S tokens of a slot, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jetspec_jax.cache.stores import PAGE_SIZE, ring_pages
from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import DraftHeadProposer
from jetspec_jax.decode.state import DecodeState
from jetspec_jax.decode.unseen import FEED_ROWS
from jetspec_jax.device.memory import (
    TARGET_WEIGHTS,
    Bytes,
    array_bytes,
    check_memory,
    largest_parameter_bytes,
)
from jetspec_jax.tree import BUCKETS
from pallas_kernels.dispatch import gpu_problem

# One launch shows a chunk to the proposer.
PREFILL_CHUNK = FEED_ROWS
# With "auto", about how many rows of taps all slots together keep until the proposer drafts, if that is room
# for a dispatch in each.
UNSEEN_ROWS = 4096
# Tokens that a slot can hold unless a request needs more: most requests then share their programs.
DEFAULT_CAPACITY = 1024
# Float32 arrays of the logits' size that live at one time: the logits, and what sampling with a filter makes
# of them. XLA reserves those for greedy requests too. A test holds this against XLA's own count.
LOGITS_COPIES = 6


@dataclass(frozen=True)
class EngineSize:
    """How much an engine holds.

    Attributes:
        slots: Requests that decode at the same time.
        capacity: Tokens of a slot, prompt and output together.
        num_pages: Pages of all slots together.
    """

    slots: int
    capacity: int
    num_pages: int

    @classmethod
    def of(
        cls, target: ModelConfig, slots: int, capacity: int | None, num_pages: int | None = None
    ) -> "EngineSize":
        """A size, checked; None is the usual capacity, and pages enough for every slot to be full.

        Raises:
            ValueError: It is out of its range.
        """
        limit = target.max_position_embeddings
        capacity = default_capacity(target, 0) if capacity is None else capacity
        if slots < 1:
            raise ValueError(f"an engine needs at least one slot, not {slots}")
        if not 1 <= capacity <= limit:
            raise ValueError(f"capacity must lie in 1..{limit}, the target's context limit, not {capacity}")
        return cls(slots, capacity, slots * pages_for(capacity) if num_pages is None else num_pages)

    @property
    def pages_per_slot(self) -> int:
        """Pages that a slot can name."""
        return pages_for(self.capacity)

    def tokens_in_store(self, layer: LayerConfig) -> int:
        """Tokens of a slot for which a layer's store has room."""
        pages = self.pages_per_slot
        if layer.window is not None:
            pages = min(pages, ring_pages(layer.window, PAGE_SIZE))
        return pages * PAGE_SIZE

    def empty_state(self, decoder: TreeDecoder, dtype: jnp.dtype) -> DecodeState:
        """A decoder's state of this size."""
        # One that always drafts shows every chunk before the next; with "auto" whole dispatches wait.
        rows = PREFILL_CHUNK if decoder.auto is None else max(UNSEEN_ROWS // self.slots, decoder.max_rounds)
        return decoder.empty_state(
            self.slots,
            num_pages=self.num_pages,
            pages_per_slot=self.pages_per_slot,
            page_size=PAGE_SIZE,
            dtype=dtype,
            unseen_rows=rows,
        )


def pages_for(tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-tokens // PAGE_SIZE)


def default_capacity(config: ModelConfig, need: int) -> int:
    """Tokens per slot: the usual capacity, or the next power of two that holds ``need``."""
    usual = max(DEFAULT_CAPACITY, 1 << (need - 1).bit_length() if need else 0)
    return min(usual, config.max_position_embeddings)


def check_engine_memory(
    decoder: TreeDecoder,
    size: EngineSize,
    dtype: jnp.dtype,
    *,
    weights: Callable[[], Bytes] = dict,
    reclaimed: int = 0,
) -> None:
    """Checks that the device can hold an engine, with a margin of the target's largest matrix.

    The margin is for XLA, which times products on copies of their operands while it compiles, and for gaps
    between arrays.

    Args:
        decoder: The engine's decoder.
        size: How much it should hold.
        dtype: Of the stores and of the computation.
        weights: Weights that are not on the device yet.
        reclaimed: Bytes in use that are given back first.

    Raises:
        DeviceMemoryError: It cannot. The message lists all parts, their sum, and what would fit.
    """

    def needs(
        decoder: TreeDecoder = decoder, size: EngineSize = size, dtype: jnp.dtype = dtype
    ) -> dict[str, int]:
        state = jax.eval_shape(lambda: size.empty_state(decoder, dtype))
        unseen = 0 if state.unseen is None else array_bytes(state.unseen)
        return {
            **weights(),
            f"stores of {size.slots} x {size.capacity} tokens": array_bytes(state) - unseen,
            **({"taps for the draft head": unseen} if unseen else {}),
            f"workspace for {size.slots} x {decoder.bucket} nodes": workspace_bytes(decoder, size, dtype),
            "margin": largest_parameter_bytes(decoder.target, dtype),
        }

    def smaller() -> Iterator[tuple[str, int | str, Bytes]]:
        for bucket in reversed(BUCKETS[: BUCKETS.index(decoder.bucket)]):
            proposer = None if bucket == 1 else decoder.proposer
            yield "budget", bucket, needs(decoder=replace(decoder, bucket=bucket, proposer=proposer))
        for capacity in _halves(size.capacity):
            yield "capacity", capacity, needs(size=EngineSize.of(decoder.target, size.slots, capacity))
        for slots in _halves(size.slots):
            yield "max_slots", slots, needs(size=EngineSize.of(decoder.target, slots, size.capacity))
        if dtype.itemsize > 2 and TARGET_WEIGHTS in weights():  # a loaded target keeps its dtype
            half = {name: count // 2 for name, count in weights().items()}
            yield "dtype", "bfloat16", {**needs(dtype=jnp.dtype(jnp.bfloat16)), **half}

    check_memory(needs, reclaimed=reclaimed, smaller=smaller)


def workspace_bytes(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype) -> int:
    """Bytes, from above, that the largest program of a decoder needs beside its arguments while it runs.

    They are: float32 logits ``[B, N, V]`` as often as sampling copies them (or draft logits ``[B, D, V]``,
    where those are more); the block's rows in the stash of all layers, in the taps, and in what one layer
    makes of them; and, where attention is plain XLA, what it makes in a forward of the target, or of the
    head if that is more: the head has no windows.
    """
    target, slots, nodes = decoder.target, size.slots, decoder.bucket
    logits = LOGITS_COPIES * slots * max(nodes, decoder.depth) * target.vocab_size
    rows = max(slots * nodes, PREFILL_CHUNK)
    keys_values = [layer.kv_size for layer in target.layers]
    # Of plain rounds, which the proposer sees later: those of a dispatch, and where they are put together.
    waiting = 0 if decoder.auto is None else 2 * slots * decoder.max_rounds
    taps = decoder.features * (rows + waiting)
    layer = 4 * target.hidden_size + max(map(_row_elements, target.layers))
    attention = 0
    if decoder.implementation == "xla" or (decoder.implementation is None and gpu_problem()):
        block = max(nodes, PREFILL_CHUNK)
        attention = _attention_bytes(target, size, rows, block, dtype)
        if isinstance(decoder.proposer, DraftHeadProposer):
            head = decoder.proposer.config
            drafts = slots * head.block_size
            attention = max(attention, _attention_bytes(head.layers, size, drafts, head.block_size, dtype))
    return 4 * logits + dtype.itemsize * (taps + rows * (sum(keys_values) + layer)) + attention


def _attention_bytes(config: ModelConfig, size: EngineSize, rows: int, block: int, dtype: jnp.dtype) -> int:
    """Bytes of a forward's attention in plain XLA: pages gathered for every layer, and a layer's scores."""
    tokens = [size.tokens_in_store(layer) for layer in config.layers]
    pages = [layer.kv_size * own for layer, own in zip(config.layers, tokens, strict=True)]
    scores = [layer.num_heads * (own + 2 * block) for layer, own in zip(config.layers, tokens, strict=True)]
    # One copy more, in the layer at work: what nobody sees is masked.
    return dtype.itemsize * size.slots * (sum(pages) + max(pages)) + 4 * 2 * rows * max(scores)


def _row_elements(layer: LayerConfig) -> int:
    """Elements that a layer makes of a row, but for the stream: of attention, and of feed-forward blocks."""
    features = 3 * layer.mlp_size
    if layer.experts is not None:
        features += 3 * layer.experts.routing.top_k * layer.experts.size + 2 * layer.experts.count
    return 4 * layer.num_heads * layer.head_dim + 2 * layer.kv_size + features


def _halves(value: int) -> Iterator[int]:
    """Half of a value, a quarter, and so on down to 1."""
    while (value := value // 2) >= 1:
        yield value
