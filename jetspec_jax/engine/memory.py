"""Whether a device can hold an engine, or its part of one: stores, and what a round needs beside them.

Shapes: B slots, N nodes, D draft depth, V vocabulary.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.cache.ring import ring_pages
from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.decode import snapshots
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.proposer import DraftHeadProposer, taps_of
from jetspec_jax.decode.scoring import SCORED_CHUNK, empty_scoring_state
from jetspec_jax.decode.snapshots import Snapshots
from jetspec_jax.decode.state import DecodeState
from jetspec_jax.device.memory import (
    TARGET_WEIGHTS,
    Alternative,
    Bytes,
    array_bytes,
    check_memory,
    largest_parameter_bytes,
    with_more_devices,
)
from jetspec_jax.device.mesh import shardings, size_of
from jetspec_jax.device.partition import is_split, own_part
from jetspec_jax.engine.extras import NO_EXTRAS, Extras
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.sampling.adjust import Adjustments
from jetspec_jax.tree import BUCKETS
from pallas_kernels.dispatch import gpu_problem
from pallas_kernels.gated_delta import SOLVED

# Float32 arrays of the logits' size that live at one time: the logits, and what sampling with a filter makes
# of them. XLA reserves those for greedy requests too. A test holds this against XLA's own count.
LOGITS_COPIES = 6
# Likewise of the noise of the whole vocabulary, which is made apart where logits are those of a part.
NOISE_COPIES = 2
# Likewise of a recurrent layer: arrays of all pairs of rows for each value head, and of all channels of rows.
PAIR_COPIES, ROW_COPIES = 4, 6


def no_weights(mesh: Mesh | None) -> Bytes:
    """Those of models that are loaded."""
    return {}


def empty_state(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype) -> DecodeState:
    """A decoder's state of some size, whose slots are all free."""
    return decoder.empty_state(
        size.slots,
        num_pages=size.num_pages,
        pages_per_slot=size.pages_per_slot,
        page_size=PAGE_SIZE,
        dtype=dtype,
    )


def empty_snapshots(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype) -> Snapshots:
    """Places for an engine's snapshots; nothing where it has none."""
    if not size.snapshots:
        return ()
    return snapshots.empty_snapshots(
        decoder.models,
        size.snapshots,
        pages_per_slot=size.pages_per_slot,
        page_size=PAGE_SIZE,
        dtype=dtype,
    )


def check_engine_memory(
    decoder: TreeDecoder,
    size: EngineSize,
    dtype: jnp.dtype,
    extras: Extras = NO_EXTRAS,
    *,
    weights: Callable[[Mesh | None], Bytes] = no_weights,
) -> None:
    """Checks that the decoder's devices can hold an engine, with a margin: see `engine_bytes`.

    Args:
        decoder: The engine's decoder.
        size: How much it should hold.
        dtype: Of the stores and of the computation.
        extras: What its requests may want beside.
        weights: Weights that are not on the devices yet: those of one device of a mesh.

    Raises:
        DeviceMemoryError: It cannot. The message lists all parts, their sum, and what would fit.
    """

    def needs(
        decoder: TreeDecoder = decoder, size: EngineSize = size, dtype: jnp.dtype = dtype
    ) -> dict[str, int]:
        return {**weights(decoder.mesh), **engine_bytes(decoder, size, dtype, extras)}

    def resized(slots: int, capacity: int) -> EngineSize:
        other = replace(EngineSize.of(decoder.target, slots, capacity), most_rows=size.most_rows)
        return other.with_snapshots(size.snapshots * slots // size.slots)

    def others() -> Iterator[Alternative]:
        mesh = decoder.mesh
        for bucket in reversed(BUCKETS[: BUCKETS.index(decoder.bucket)]):
            proposer = None if bucket == 1 else decoder.proposer
            own = needs(decoder=replace(decoder, bucket=bucket, proposer=proposer))
            yield Alternative("budget", bucket, own, mesh)
        for capacity in _halves(size.capacity):
            own = needs(size=resized(size.slots, capacity))
            yield Alternative("capacity", capacity, own, mesh)
        for slots in _halves(size.slots):
            own = needs(size=resized(slots, size.capacity))
            yield Alternative("max_slots", slots, own, mesh)
        if TARGET_WEIGHTS not in (unread := weights(mesh)):  # a loaded target keeps its dtype and its mesh
            return
        if dtype.itemsize > 2:
            half = {name: count // 2 for name, count in unread.items()}
            own = {**needs(dtype=jnp.dtype(jnp.bfloat16)), **half}
            yield Alternative("dtype", "bfloat16", own, mesh)
        yield from with_more_devices(
            decoder.target, mesh, lambda larger: needs(decoder=replace(decoder, mesh=larger))
        )

    check_memory(needs, mesh=decoder.mesh, others=others)


def engine_bytes(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype, extras: Extras) -> dict[str, int]:
    """Bytes on a device of an engine's parts, with a margin of the target's largest matrix.

    The margin is for XLA, which times products on copies of their operands while it compiles, and for gaps
    between arrays.
    """
    return {
        f"stores of {size.slots} x {size.capacity} tokens": state_bytes(decoder, size, dtype),
        **snapshot_bytes(decoder, size, dtype),
        _workspace(decoder, size): workspace_bytes(decoder, size, dtype),
        **extra_bytes(decoder, size, dtype, extras),
        "margin": largest_parameter_bytes(decoder.target, dtype, decoder.mesh),
    }


def _workspace(decoder: TreeDecoder, size: EngineSize) -> str:
    nodes = f"{size.slots} x {decoder.bucket}" if size.most_rows is None else size.nodes(decoder.bucket)
    return f"workspace for {nodes} nodes"


def check_extra_memory(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype, extras: Extras) -> None:
    """Checks that the devices can hold what an engine that they hold gets beside.

    Raises:
        DeviceMemoryError: They cannot.
    """
    needs = extra_bytes(decoder, size, dtype, extras)
    needs[_workspace(decoder, size)] = workspace_bytes(decoder, size, dtype)
    check_memory(lambda: needs, mesh=decoder.mesh)


def extra_bytes(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype, extras: Extras) -> dict[str, int]:
    """Bytes on a device of what an engine has beside stores and workspace, from above."""
    own, found = own_part(decoder.target, decoder.mesh), {}
    slots, vocab = size.slots, decoder.target.vocab_size
    if extras.adjusts:
        arrays = jax.eval_shape(lambda: Adjustments.empty(slots, vocab, extras.bad_words))
        # As they are kept, and those of the slots that a dispatch is for.
        found[f"adjustments of {slots} x {vocab} tokens"] = 2 * array_bytes(arrays)
    if extras.adjusts and extras.logprobs:
        # Of the logits as they were.
        rows = max(size.nodes(decoder.bucket), slots * decoder.depth)
        found[f"log-probabilities of {slots} x {decoder.bucket} nodes"] = 4 * rows * own.vocab_size
    if extras.prompt_logprobs:
        state = jax.eval_shape(lambda: empty_scoring_state(decoder.alone, size.capacity, dtype))
        rows = 4 * LOGITS_COPIES * SCORED_CHUNK * own.vocab_size
        found[f"log-probabilities of a prompt of {size.capacity} tokens"] = (
            _on_device(decoder.alone, state) + rows
        )
    return found


def state_bytes(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype) -> int:
    """Bytes of a decoder's state on a device."""
    return _on_device(decoder, jax.eval_shape(lambda: empty_state(decoder, size, dtype)))


def snapshot_bytes(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype) -> dict[str, int]:
    """Bytes of an engine's snapshots on a device, if it has any."""
    if not size.snapshots:
        return {}
    arrays, mesh = jax.eval_shape(lambda: empty_snapshots(decoder, size, dtype)), decoder.mesh
    own = None if mesh is None else shardings(mesh, snapshots.snapshot_specs(arrays))
    return {f"{size.snapshots} snapshots of windows and states": array_bytes(arrays, own)}


def workspace_bytes(decoder: TreeDecoder, size: EngineSize, dtype: jnp.dtype) -> int:
    """Bytes, from above, that the largest program of a decoder needs beside its arguments while it runs.

    They are: float32 logits ``[B, N, V]`` as often as sampling copies them; the block's rows in the stash of
    all layers, in the taps, and in what one layer makes of them, for a recurrent one also what its rows are
    to each other; and, where attention is plain XLA, what it makes in a forward of the target, or of the head
    if that is more: the head has no windows.

    Of a mesh a device has its own heads, features and tokens of the vocabulary. What the residual stream and
    the taps take is whole, and so is the noise ``[B, D + 1, V]``, of which each device takes its tokens.
    """
    mesh, slots, nodes = decoder.mesh, size.slots, decoder.bucket
    target, all_nodes = own_part(decoder.target, mesh), size.nodes(decoder.bucket)
    logits = LOGITS_COPIES * all_nodes * target.vocab_size
    if size_of(mesh) > 1:
        logits += NOISE_COPIES * slots * (decoder.depth + 1) * decoder.target.vocab_size
    rows = max(all_nodes, size.chunk_rows)
    stash = sum(_stash_bytes(layer, dtype) for layer in target.layers)
    taps = len(taps_of(decoder.proposer)) * target.hidden_size * rows
    layer = 4 * target.hidden_size + max(map(_row_elements, target.layers))
    attention = 0
    if decoder.implementation == "xla" or (decoder.implementation is None and gpu_problem()):
        block = max(nodes, *(rows for _, rows in size.chunks))
        attention = _attention_bytes(target, size, rows, block, dtype)
        if isinstance(decoder.proposer, DraftHeadProposer):
            head = decoder.proposer.config
            layers = own_part(head.layers, mesh if mesh is not None and is_split(head, mesh) else None)
            drafts = slots * head.block_size
            attention = max(attention, _attention_bytes(layers, size, drafts, head.block_size, dtype))
    pairs = max(all_nodes * nodes, *(prompts * min(rows, SOLVED) ** 2 for prompts, rows in size.chunks))
    recurrence = max(_recurrence_bytes(layer, rows, pairs) for layer in target.layers)
    return 4 * logits + dtype.itemsize * (taps + rows * layer) + rows * stash + attention + recurrence


def _on_device(models: Models, state: DecodeState) -> int:
    """Bytes of a state on a device."""
    if models.mesh is None:
        return array_bytes(state)
    return array_bytes(state, shardings(models.mesh, models.state_specs(state)))


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
