"""Whether a device can hold an engine: its stores, and what a round needs beside them.

Shapes: B slots, N nodes, D draft depth, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp

from jetspec_jax.cache.ring import ring_pages
from jetspec_jax.cache.slots import PAGE_SIZE
from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import DraftHeadProposer, taps_of
from jetspec_jax.decode.state import DecodeState
from jetspec_jax.device.memory import (
    TARGET_WEIGHTS,
    Bytes,
    array_bytes,
    check_memory,
    largest_parameter_bytes,
)
from jetspec_jax.engine.size import PREFILL_CHUNK, EngineSize
from jetspec_jax.tree import BUCKETS
from pallas_kernels.dispatch import gpu_problem

# Float32 arrays of the logits' size that live at one time: the logits, and what sampling with a filter makes
# of them. XLA reserves those for greedy requests too. A test holds this against XLA's own count.
LOGITS_COPIES = 6
# Likewise of a recurrent layer: arrays of all pairs of rows for each value head, and of all channels of rows.
PAIR_COPIES, ROW_COPIES = 4, 6


def empty_state(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype) -> DecodeState:
    """A decoder's state of some size, whose slots are all free."""
    return decoder.empty_state(
        size.slots,
        num_pages=size.num_pages,
        pages_per_slot=size.pages_per_slot,
        page_size=PAGE_SIZE,
        dtype=dtype,
    )


def check_engine_memory(
    decoder: TreeDecoder,
    size: EngineSize,
    dtype: jnp.dtype,
    *,
    weights: Callable[[], Bytes] = dict,
) -> None:
    """Checks that the device can hold an engine, with a margin of the target's largest matrix.

    The margin is for XLA, which times products on copies of their operands while it compiles, and for gaps
    between arrays.

    Args:
        decoder: The engine's decoder.
        size: How much it should hold.
        dtype: Of the stores and of the computation.
        weights: Weights that are not on the device yet.

    Raises:
        DeviceMemoryError: It cannot. The message lists all parts, their sum, and what would fit.
    """

    def needs(
        decoder: TreeDecoder = decoder, size: EngineSize = size, dtype: jnp.dtype = dtype
    ) -> dict[str, int]:
        state = jax.eval_shape(lambda: empty_state(decoder, size, dtype))
        return {
            **weights(),
            f"stores of {size.slots} x {size.capacity} tokens": array_bytes(state),
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

    check_memory(needs, smaller=smaller)


def workspace_bytes(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype) -> int:
    """Bytes, from above, that the largest program of a decoder needs beside its arguments while it runs.

    They are: float32 logits ``[B, N, V]`` as often as sampling copies them (or draft logits ``[B, D, V]``,
    where those are more); the block's rows in the stash of all layers, in the taps, and in what one layer
    makes of them, for a recurrent one also what its rows are to each other; and, where attention is plain
    XLA, what it makes in a forward of the target, or of the head if that is more: the head has no windows.
    """
    target, slots, nodes = decoder.target, size.slots, decoder.bucket
    logits = LOGITS_COPIES * slots * max(nodes, decoder.depth) * target.vocab_size
    rows = max(slots * nodes, PREFILL_CHUNK)
    stash = sum(_stash_bytes(layer, dtype) for layer in target.layers)
    taps = len(taps_of(decoder.proposer)) * target.hidden_size * rows
    layer = 4 * target.hidden_size + max(map(_row_elements, target.layers))
    attention = 0
    if decoder.implementation == "xla" or (decoder.implementation is None and gpu_problem()):
        block = max(nodes, PREFILL_CHUNK)
        attention = _attention_bytes(target, size, rows, block, dtype)
        if isinstance(decoder.proposer, DraftHeadProposer):
            head = decoder.proposer.config
            drafts = slots * head.block_size
            attention = max(attention, _attention_bytes(head.layers, size, drafts, head.block_size, dtype))
    pairs = max(slots * nodes**2, PREFILL_CHUNK**2)
    recurrence = max(_recurrence_bytes(layer, rows, pairs) for layer in target.layers)
    return 4 * logits + dtype.itemsize * (taps + rows * layer) + rows * stash + attention + recurrence


def _stash_bytes(layer: LayerConfig, dtype: jnp.dtype) -> int:
    """Bytes that a commit of a row could need of a layer."""
    own = layer.recurrence
    if own is None:
        return dtype.itemsize * layer.kv_size
    # Keys, what is added to the state, and decays are float32.
    wide = own.num_key_heads * own.key_dim + own.num_value_heads * (own.value_dim + 1)
    return dtype.itemsize * own.channels + 4 * wide


def _recurrence_bytes(layer: LayerConfig, rows: int, pairs: int) -> int:
    """Bytes that a recurrent layer makes of its rows, and of all pairs of them; see `gated_delta`."""
    own = layer.recurrence
    if own is None:
        return 0
    return 4 * (PAIR_COPIES * pairs * own.num_value_heads + ROW_COPIES * rows * own.channels)


def _attention_bytes(config: ModelConfig, size: EngineSize, rows: int, block: int, dtype: jnp.dtype) -> int:
    """Bytes of a forward's attention in plain XLA: pages gathered for every layer, and a layer's scores."""
    tokens = [_tokens_in_store(layer, size) for layer in config.layers]
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


def _tokens_in_store(layer: LayerConfig, size: EngineSize) -> int:
    """Tokens of a slot for which a layer's store has room."""
    pages = size.pages_per_slot
    if layer.window is not None:
        pages = min(pages, ring_pages(layer.window, PAGE_SIZE))
    return pages * PAGE_SIZE
