"""Checks whether a device can hold an engine, or its shard of one: stores, workspace and optional arrays.

Shapes: B slots, N nodes, D draft depth, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.cache.pages import PAGE_SIZE
from jetspec_jax.cache.ring import ring_pages
from jetspec_jax.config import LayerConfig, ModelConfig
from jetspec_jax.decode import snapshots
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
    fits,
    largest_parameter_bytes,
    with_more_devices,
)
from jetspec_jax.device.mesh import shardings, size_of
from jetspec_jax.device.partition import is_split, own_part
from jetspec_jax.engine.pages import pages_for
from jetspec_jax.engine.planning import EnginePlan
from jetspec_jax.engine.size import EngineSize
from jetspec_jax.sampling.adjust import Adjustments
from jetspec_jax.tree import BUCKETS
from pallas_kernels.dispatch import gpu_problem
from pallas_kernels.gated_delta import SOLVED

# Float32 arrays of the logits' size that live at the same time: the logits, and their copies for sampling
# with a filter. XLA reserves the copies for greedy requests too. A test compares this with XLA's own count.
LOGITS_COPIES = 6
# Likewise for noise of the whole vocabulary, which is separate if logits are sharded.
NOISE_COPIES = 2
# Likewise for a recurrent layer: arrays of all pairs of rows per value head, and of all channels of rows.
PAIR_COPIES, ROW_COPIES = 4, 6


def empty_state(plan: EnginePlan) -> DecodeState:
    """The state of an engine whose slots are all free."""
    size = plan.size
    return plan.decoder.empty_state(
        size.slots,
        num_pages=size.num_pages,
        pages_per_slot=size.pages_per_slot,
        page_size=PAGE_SIZE,
        dtype=plan.dtype,
    )


def empty_snapshots(plan: EnginePlan) -> Snapshots:
    """Allocates an engine's snapshots, if it has any."""
    size = plan.size
    if not size.snapshots:
        return ()
    return snapshots.empty_snapshots(
        plan.decoder.models,
        size.snapshots,
        pages_per_slot=size.pages_per_slot,
        page_size=PAGE_SIZE,
        dtype=plan.dtype,
    )


def check_engine_memory(plan: EnginePlan, weights: Callable[[Mesh | None], Bytes] = lambda mesh: {}) -> None:
    """Checks that an engine's devices can hold it, with a margin: see `engine_bytes`.

    ``weights`` gives the bytes, on one device of a mesh, of weights that are not loaded yet.

    Raises:
        DeviceMemoryError: They cannot. The message lists all parts, their sum, and smaller settings that fit.
    """
    decoder, size, mesh = plan.decoder, plan.size, plan.decoder.mesh

    def needs(plan: EnginePlan = plan) -> dict[str, int]:
        return {**weights(plan.decoder.mesh), **engine_bytes(plan)}

    def others() -> Iterator[Alternative]:
        for bucket in reversed(BUCKETS[: BUCKETS.index(decoder.bucket)]):
            smaller = replace(decoder, bucket=bucket, proposer=None if bucket == 1 else decoder.proposer)
            yield Alternative("budget", bucket, needs(replace(plan, decoder=smaller)), mesh)
        for capacity in _halves(size.capacity):
            shorter = replace(size, capacity=capacity, num_pages=size.slots * pages_for(capacity))
            yield Alternative("capacity", capacity, needs(replace(plan, size=shorter)), mesh)
        for slots in _halves(size.slots):
            fewer = replace(plan, size=size.with_slots(slots))
            yield Alternative("max_slots", slots, needs(fewer), mesh)
        if TARGET_WEIGHTS not in (unread := weights(mesh)):  # a loaded target keeps its dtype and its mesh
            return
        if plan.dtype.itemsize > 2:
            half = {name: count // 2 for name, count in unread.items()}
            halved = {**needs(replace(plan, dtype=jnp.dtype(jnp.bfloat16))), **half}
            yield Alternative("dtype", "bfloat16", halved, mesh)
        yield from with_more_devices(decoder.target, mesh, lambda larger: needs(plan.on(larger)))

    check_memory(needs, mesh=mesh, others=others)


def with_slots_that_fit(plan: EnginePlan, meshes: Sequence[Mesh | None]) -> EnginePlan:
    """The plan with all its slots, half of them, a quarter, …: as many as each of some meshes has memory for.

    If one slot does not fit either, the engine's error says how much memory is missing.
    """
    most = plan.size.slots
    while most > 1 and not all(fits(engine_bytes(plan.on(mesh)), mesh) for mesh in meshes):
        most //= 2
        plan = replace(plan, size=plan.size.with_slots(most))
    return plan


def checked(plan: EnginePlan, *, fewer_slots: bool) -> EnginePlan:
    """The plan whose engine is about to be made, with `with_slots_that_fit` if it may have ``fewer_slots``.

    Raises:
        DeviceMemoryError: The devices cannot hold it.
    """
    if fewer_slots:
        plan = with_slots_that_fit(plan, [plan.decoder.mesh])
    check_engine_memory(plan)
    return plan


def engine_bytes(plan: EnginePlan) -> dict[str, int]:
    """Bytes per device of an engine's parts, with a margin of the target's largest matrix.

    The margin is for XLA, which times products on copies of their operands while it compiles, and for gaps
    between arrays.
    """
    return {
        f"stores of {plan.size.slots} x {plan.size.capacity} tokens": state_bytes(plan),
        **snapshot_bytes(plan),
        _workspace_name(plan): workspace_bytes(plan),
        **extra_bytes(plan),
        "margin": largest_parameter_bytes(plan.decoder.target, plan.dtype, plan.decoder.mesh),
    }


def _workspace_name(plan: EnginePlan) -> str:
    size, bucket = plan.size, plan.decoder.bucket
    return (
        f"workspace for {f'{size.slots} x {bucket}' if size.most_rows is None else size.nodes(bucket)} nodes"
    )


def extra_bytes(plan: EnginePlan) -> dict[str, int]:
    """An upper bound of the bytes per device of optional features, which any request may use."""
    decoder, size = plan.decoder, plan.size
    config, needs = own_part(decoder.target, decoder.mesh), {}
    slots, vocab = size.slots, decoder.target.vocab_size
    arrays = jax.eval_shape(lambda: Adjustments.empty(slots, vocab))
    # One copy of all slots, and one of a dispatch's slots.
    needs[f"adjustments of {slots} x {vocab} tokens"] = 2 * array_bytes(arrays)
    # A copy of the logits before adjustments.
    rows = max(size.nodes(decoder.bucket), slots * decoder.depth)
    needs[f"log-probabilities of {slots} x {decoder.bucket} nodes"] = 4 * rows * config.vocab_size
    state = jax.eval_shape(lambda: empty_scoring_state(decoder.alone, size.capacity, plan.dtype))
    rows = 4 * LOGITS_COPIES * SCORED_CHUNK * config.vocab_size
    held = _on_device(decoder.alone, state)
    needs[f"log-probabilities of a prompt of {size.capacity} tokens"] = held + rows
    return needs


def state_bytes(plan: EnginePlan) -> int:
    """Bytes of an engine's state per device."""
    return _on_device(plan.decoder, jax.eval_shape(lambda: empty_state(plan)))


def snapshot_bytes(plan: EnginePlan) -> dict[str, int]:
    """Bytes of an engine's snapshots per device, if it has any."""
    if not plan.size.snapshots:
        return {}
    arrays, mesh = jax.eval_shape(lambda: empty_snapshots(plan)), plan.decoder.mesh
    placement = None if mesh is None else shardings(mesh, snapshots.snapshot_specs(arrays))
    return {f"{plan.size.snapshots} snapshots of windows and states": array_bytes(arrays, placement)}


def workspace_bytes(plan: EnginePlan) -> int:
    """An upper bound of the bytes that an engine's largest program needs beside its arguments.

    These are: float32 logits ``[B, N, V]``, with the copies for sampling; the noise ``[B, D + 1, V]``, which
    lives from the draft to the choice; the block's rows in the stash of
    all layers, in the taps, and in one layer's activations, with all pairs of rows for a recurrent layer;
    and, if attention is plain XLA, its activations in a forward of the target, or of the head if they are
    larger: the head has no windows.

    A device of a mesh has its own heads, features and tokens of the vocabulary. The residual stream and the
    taps are not sharded, nor is the noise when it is made, of which each device keeps its tokens.
    """
    decoder, size, dtype = plan.decoder, plan.size, plan.dtype
    mesh, slots, nodes = decoder.mesh, size.slots, decoder.bucket
    target, all_nodes = own_part(decoder.target, mesh), size.nodes(decoder.bucket)
    noise_rows = slots * (decoder.depth + 1)
    logits = (LOGITS_COPIES * all_nodes + noise_rows) * target.vocab_size
    if size_of(mesh) > 1:
        logits += NOISE_COPIES * noise_rows * decoder.target.vocab_size
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
    """Bytes of a state per device."""
    if models.mesh is None:
        return array_bytes(state)
    return array_bytes(state, shardings(models.mesh, models.state_specs(state)))


def _stash_bytes(layer: LayerConfig, dtype: jnp.dtype) -> int:
    """Bytes of a layer's stash per row."""
    recurrence = layer.recurrence
    if recurrence is None:
        return dtype.itemsize * layer.kv_size
    # Keys, updates of the state, and decays are float32.
    wide = recurrence.num_key_heads * recurrence.key_dim + recurrence.num_value_heads * (
        recurrence.value_dim + 1
    )
    return dtype.itemsize * recurrence.channels + 4 * wide


def _recurrence_bytes(layer: LayerConfig, rows: int, pairs: int) -> int:
    """Bytes of a recurrent layer's activations, for rows and all pairs of rows; see `gated_delta`."""
    recurrence = layer.recurrence
    if recurrence is None:
        return 0
    return 4 * (PAIR_COPIES * pairs * recurrence.num_value_heads + ROW_COPIES * rows * recurrence.channels)


def _attention_bytes(config: ModelConfig, size: EngineSize, rows: int, block: int, dtype: jnp.dtype) -> int:
    """Bytes of attention in plain XLA: gathered pages of every layer, and one layer's scores."""
    tokens = [_tokens_in_store(layer, size) for layer in config.layers]
    layers = list(zip(config.layers, tokens, strict=True))
    pages = [layer.kv_size * count for layer, count in layers]
    scores = [layer.num_heads * (count + 2 * block) for layer, count in layers]
    # One more copy in the current layer, whose invalid tokens are masked.
    return dtype.itemsize * size.slots * (sum(pages) + max(pages)) + 4 * 2 * rows * max(scores)


def _row_elements(layer: LayerConfig) -> int:
    """Elements of a layer's activations per row, without the residual stream: attention and feed-forward."""
    features = 3 * layer.mlp_size
    if layer.experts is not None:
        features += 3 * layer.experts.routing.top_k * layer.experts.size + 2 * layer.experts.count
    return 4 * layer.num_heads * layer.head_dim + 2 * layer.kv_size + features


def _halves(value: int) -> Iterator[int]:
    """Half of a value, a quarter, and so on down to 1."""
    while (value := value // 2) >= 1:
        yield value


def _tokens_in_store(layer: LayerConfig, size: EngineSize) -> int:
    """Tokens per slot of a layer's store."""
    pages = size.pages_per_slot
    if layer.window is not None:
        pages = min(pages, ring_pages(layer.window, PAGE_SIZE))
    return pages * PAGE_SIZE
