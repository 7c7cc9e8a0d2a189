"""Plans of engines: everything that defines one except its weights, and whether its devices can hold it.

Shapes: B slots, N nodes, D draft depth, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.arguments import check_integer
from jetspec_jax.cache.pages import PAGE_SIZE, pages_for
from jetspec_jax.cache.ring import ring_pages
from jetspec_jax.config import DraftHeadConfig, LayerConfig, ModelConfig
from jetspec_jax.decode import snapshots as slot_snapshots
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.models import Models
from jetspec_jax.decode.proposer import DraftHeadProposer, Proposer, taps_of
from jetspec_jax.decode.scoring import SCORED_CHUNK, empty_scoring_state
from jetspec_jax.decode.settings import TreeSettings, make_decoder
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
    weight_bytes,
    with_more_devices,
)
from jetspec_jax.device.mesh import shardings, size_of
from jetspec_jax.device.partition import is_split, own_part
from jetspec_jax.engine.policy import MAX_ROUNDS
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import (
    CPU_PREFILL_TOKENS,
    MOST_ROWS,
    PREFILL_TOKENS,
    EngineSize,
    chunks_for,
    default_capacity,
    powers,
)
from jetspec_jax.sampling.adjust import Adjustments
from jetspec_jax.tree import BUCKETS, Auto, algorithm_of, tree_buckets
from pallas_kernels.dispatch import gpu_problem
from pallas_kernels.gated_delta import SOLVED

#: Bytes of a target on one device whose rounds are shorter than their launch on every GPU: at 4 TB/s they are
#: read in half a millisecond, and a launch of all kernels of a round takes longer.
SMALL_TARGET = 2 << 30
# Float32 arrays of the logits' size that live at the same time: the logits, and their copies for sampling
# with a filter. XLA reserves the copies for greedy requests too. A test compares this with XLA's own count.
LOGITS_COPIES = 6
# Likewise for noise of the whole vocabulary, which is separate if logits are sharded.
NOISE_COPIES = 2
# Likewise for a recurrent layer: arrays of all pairs of rows per value head, and of all channels of rows.
PAIR_COPIES, ROW_COPIES = 4, 6


@dataclass(frozen=True)
class EnginePlan:
    """Everything that defines an engine, except its weights."""

    decoder: TreeDecoder  # of the largest trees
    size: EngineSize
    dtype: jnp.dtype  # of the weights and the stores
    least_nodes: int = BUCKETS[1]  # of the trees that "auto" may choose

    @property
    def auto(self) -> Auto | None:
        """The algorithm, if it chooses among the buckets up to the decoder's."""
        algorithm = algorithm_of(self.decoder.algorithm)
        return algorithm if isinstance(algorithm, Auto) and self.decoder.bucket > 1 else None

    @property
    def decoders(self) -> tuple[TreeDecoder, ...]:
        """Plain decoding, and trees of the decoder's bucket; with "auto", of each bucket up to it."""
        largest, auto = self.decoder, self.auto
        if largest.bucket == 1:
            return (largest,)
        if auto is None:
            return replace(largest, bucket=1), largest
        largest = replace(largest, algorithm=auto.shape)
        buckets = tree_buckets(largest.bucket, self.least_nodes)
        trees = (replace(largest, bucket=bucket, observes=buckets) for bucket in buckets)
        return (replace(largest, bucket=1), *trees)

    @property
    def round_tokens(self) -> int:
        """Most tokens that a round commits to a slot."""
        return 1 + max(decoder.depth for decoder in self.decoders)

    def on(self, mesh: Mesh | None) -> "EnginePlan":
        """The same engine on other devices."""
        return replace(self, decoder=replace(self.decoder, mesh=mesh))

    def holding(self, requests: Sequence[Request], copies: int) -> "EnginePlan":
        """The plan of ``copies`` engines for some requests: with longer slots and more pages if need be."""
        need = max((request.most_tokens for request in requests), default=0)
        size, count = self.size, min(-(-len(requests) // copies), self.size.slots)
        if need > size.capacity:
            size = replace(size, capacity=default_capacity(self.decoder.target, need))
        if sum(sorted(request.num_pages for request in requests)[-count:]) > size.num_pages:
            size = replace(size, num_pages=count * size.pages_per_slot)
        return replace(self, size=size)


def overlaps(plan: EnginePlan) -> bool:
    """Whether an engine overlaps single rounds: the host launches one while the device runs the one before.

    On a GPU overlapped rounds let requests come and go, and callers get tokens, with every round. Models
    whose rounds are shorter than a launch keep a loop of rounds on the device, or the device would wait for
    the host. On a CPU a round takes longer than its launch, which may even compute, so nothing would overlap.
    On several devices a launch takes longer than a round: 10.7 ms beside 5.1 in a loop, 8B on two H200.
    """
    mesh = plan.decoder.mesh
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform not in ("gpu", "cuda", "rocm") or (mesh is not None and mesh.size > 1):
        return False
    return weight_bytes(plan.decoder.target, plan.dtype, mesh) >= SMALL_TARGET


def plan_engine(
    target: ModelConfig,
    head: DraftHeadConfig | None,
    settings: TreeSettings,
    dtype: jnp.dtype,
    *,
    slots: int = 1,
    capacity: int | None = None,
    num_pages: int | None = None,
    chunks: tuple[tuple[int, int], ...] | None = None,
    live: Sequence[int] | None = None,
    least_nodes: int | None = None,
    snapshots: int | None = None,
    proposer: Proposer | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> EnginePlan:
    """Plans an engine for tree settings, with stores of the weights' dtype.

    With GPU kernels there are programs for 1, 2, 4, … live slots, and with "auto" trees of 2, 4, 8, … nodes.
    On a CPU each row is work, and programs compile slowly: so there are programs for 1, 4, 16, … live slots,
    and trees of the budget or none. Without a ``head`` or a ``proposer`` it decodes plainly. Each None is the
    default of the model or the device: of pages enough for every slot to be full, of snapshots one per slot.

    Raises:
        ValueError: The head does not fit, a setting is out of its range, or the mesh cannot split a model.
    """
    decoder = make_decoder(
        target, head, settings, proposer=proposer, implementation=implementation, mesh=mesh
    )
    decoder = replace(decoder, max_rounds=MAX_ROUNDS)
    # Plain XLA computes the scores of all rows at once.
    gpu = implementation != "xla" and gpu_problem() is None
    slots = check_integer("max_slots", slots, 1)
    chunks = chunks_for(slots, gpu=gpu) if chunks is None else chunks
    if least_nodes is None:
        least_nodes = BUCKETS[1] if gpu else max(decoder.bucket, BUCKETS[1])
    size = EngineSize.of(target, slots, capacity, num_pages, chunks)
    plan = EnginePlan(decoder, size, dtype, least_nodes)
    size = replace(
        size,
        live=powers(slots, 2 if gpu else 4) if live is None else tuple(sorted(live)),
        prefill_tokens=PREFILL_TOKENS if gpu else CPU_PREFILL_TOKENS,
        # A fixed budget holds for any number of slots.
        most_rows=None if plan.auto is None else MOST_ROWS,
    )
    return replace(plan, size=size.with_snapshots(snapshots))


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
    options = {"pages_per_slot": size.pages_per_slot, "page_size": PAGE_SIZE, "dtype": plan.dtype}
    count = size.snapshots
    return slot_snapshots.empty_snapshots(plan.decoder.models, count, **options) if count else ()


def check_engine_memory(plan: EnginePlan, weights: Callable[[Mesh | None], Bytes] = lambda mesh: {}) -> None:
    """Checks that an engine's devices can hold it, with a margin: see `engine_bytes`.

    ``weights`` gives the bytes, on one device of a mesh, of weights that are not loaded yet. Raises
    DeviceMemoryError if they cannot: it lists all parts, their sum, and smaller settings that fit.
    """
    decoder, size, mesh = plan.decoder, plan.size, plan.decoder.mesh

    def needs(plan: EnginePlan = plan) -> dict[str, int]:
        return {**weights(plan.decoder.mesh), **engine_bytes(plan)}

    def halves(value: int) -> Iterator[int]:
        return (value >> times for times in range(1, value.bit_length()))

    def others() -> Iterator[Alternative]:
        for bucket in reversed(BUCKETS[: BUCKETS.index(decoder.bucket)]):
            smaller = replace(decoder, bucket=bucket, proposer=None if bucket == 1 else decoder.proposer)
            yield Alternative("budget", bucket, needs(replace(plan, decoder=smaller)), mesh)
        for capacity in halves(size.capacity):
            pages = min(size.num_pages, size.slots * pages_for(capacity))
            shorter = replace(size, capacity=capacity, num_pages=pages)
            yield Alternative("capacity", capacity, needs(replace(plan, size=shorter)), mesh)
        for slots in halves(size.slots):
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
    """The plan with all its slots, half of them, a quarter, …: as many as each mesh can hold, or one."""
    most = plan.size.slots
    while most > 1 and not all(fits(engine_bytes(plan.on(mesh)), mesh) for mesh in meshes):
        most //= 2
        plan = replace(plan, size=plan.size.with_slots(most))
    return plan


def engine_bytes(plan: EnginePlan) -> dict[str, int]:
    """Bytes per device of an engine's parts, with a margin of the target's largest matrix.

    The margin is for XLA, which times products on copies of their operands while it compiles, and for gaps
    between arrays.
    """
    size, bucket = plan.size, plan.decoder.bucket
    nodes = f"{size.slots} x {bucket}" if size.most_rows is None else size.nodes(bucket)
    return {
        f"stores of {size.slots} x {size.capacity} tokens in {size.num_pages} pages": state_bytes(plan),
        **snapshot_bytes(plan),
        f"workspace for {nodes} nodes": workspace_bytes(plan),
        **extra_bytes(plan),
        "margin": largest_parameter_bytes(plan.decoder.target, plan.dtype, plan.decoder.mesh),
    }


def extra_bytes(plan: EnginePlan) -> dict[str, int]:
    """An upper bound of the bytes per device of optional features, which any request may use."""
    decoder, size = plan.decoder, plan.size
    slots, vocab = size.slots, decoder.target.vocab_size
    shard = own_part(decoder.target, decoder.mesh).vocab_size
    arrays = jax.eval_shape(lambda: Adjustments.empty(slots, vocab))
    rows = max(size.nodes(decoder.bucket), slots * decoder.depth)
    state = jax.eval_shape(lambda: empty_scoring_state(decoder.alone, size.capacity, plan.dtype))
    scoring = _on_device(decoder.alone, state) + 4 * LOGITS_COPIES * SCORED_CHUNK * shard
    return {
        # One copy of all slots, and one of a dispatch's slots.
        f"adjustments of {slots} x {vocab} tokens": 2 * array_bytes(arrays),
        # A copy of the logits before adjustments.
        f"log-probabilities of {slots} x {decoder.bucket} nodes": 4 * rows * shard,
        f"log-probabilities of a prompt of {size.capacity} tokens": scoring,
    }


def state_bytes(plan: EnginePlan) -> int:
    """Bytes of an engine's state per device."""
    return _on_device(plan.decoder, jax.eval_shape(lambda: empty_state(plan)))


def snapshot_bytes(plan: EnginePlan) -> dict[str, int]:
    """Bytes of an engine's snapshots per device, if it has any."""
    if not plan.size.snapshots:
        return {}
    arrays, mesh = jax.eval_shape(lambda: empty_snapshots(plan)), plan.decoder.mesh
    placement = None if mesh is None else shardings(mesh, slot_snapshots.snapshot_specs(arrays))
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
    rows = max(all_nodes, *(prompts * rows for prompts, rows in size.chunks))
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
    placement = None if models.mesh is None else shardings(models.mesh, models.state_specs(state))
    return array_bytes(state, placement)


def _stash_bytes(layer: LayerConfig, dtype: jnp.dtype) -> int:
    """Bytes of a layer's stash per row."""
    if (recurrence := layer.recurrence) is None:
        return dtype.itemsize * layer.kv_size
    # Keys, updates of the state, and decays are float32.
    keys = recurrence.num_key_heads * recurrence.key_dim
    values = recurrence.num_value_heads * (recurrence.value_dim + 1)
    return dtype.itemsize * recurrence.channels + 4 * (keys + values)


def _recurrence_bytes(layer: LayerConfig, rows: int, pairs: int) -> int:
    """Bytes of a recurrent layer's activations, for rows and all pairs of rows; see `gated_delta`."""
    if (recurrence := layer.recurrence) is None:
        return 0
    return 4 * (PAIR_COPIES * pairs * recurrence.num_value_heads + ROW_COPIES * rows * recurrence.channels)


def _attention_bytes(config: ModelConfig, size: EngineSize, rows: int, block: int, dtype: jnp.dtype) -> int:
    """Bytes of attention in plain XLA: gathered pages of every layer, and one layer's scores."""
    pages, scores = [], []
    for layer in config.layers:
        ring = size.pages_per_slot if layer.window is None else ring_pages(layer.window, PAGE_SIZE)
        tokens = PAGE_SIZE * min(size.pages_per_slot, ring)
        pages.append(layer.kv_size * tokens)
        scores.append(layer.num_heads * (tokens + 2 * block))
    # One more copy in the current layer, whose invalid tokens are masked.
    return dtype.itemsize * size.slots * (sum(pages) + max(pages)) + 4 * 2 * rows * max(scores)


def _row_elements(layer: LayerConfig) -> int:
    """Elements of a layer's activations per row, without the residual stream: attention and feed-forward."""
    features = 3 * layer.mlp_size
    if layer.experts is not None:
        features += 3 * layer.experts.routing.top_k * layer.experts.size + 2 * layer.experts.count
    return 4 * layer.num_heads * layer.head_dim + 2 * layer.kv_size + features
