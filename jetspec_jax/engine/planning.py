"""Plans of engines: everything that defines one, except its weights."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.arguments import check_integer
from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import Proposer
from jetspec_jax.decode.settings import TreeSettings, make_decoder
from jetspec_jax.device.memory import weight_bytes
from jetspec_jax.device.processes import spans
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
from jetspec_jax.tree import BUCKETS, Auto, algorithm_of, tree_buckets
from pallas_kernels.dispatch import gpu_problem

#: Bytes of a target on one device whose rounds are shorter than their launch on every GPU: at 4 TB/s they are
#: read in half a millisecond, and a launch of all kernels of a round takes longer.
SMALL_TARGET = 2 << 30


@dataclass(frozen=True)
class EnginePlan:
    """Everything that defines an engine, except its weights.

    Attributes:
        decoder: Decoder of the largest trees.
        size: Slots, pages and program shapes.
        dtype: Dtype of the weights and the stores.
        least_nodes: Nodes of the smallest trees that "auto" may choose.
    """

    decoder: TreeDecoder
    size: EngineSize
    dtype: jnp.dtype
    least_nodes: int = BUCKETS[1]

    @property
    def auto(self) -> Auto | None:
        """The algorithm, if it chooses among the buckets up to the decoder's."""
        algorithm = algorithm_of(self.decoder.algorithm)
        return algorithm if isinstance(algorithm, Auto) and self.decoder.bucket > 1 else None

    @property
    def decoders(self) -> tuple[TreeDecoder, ...]:
        """The decoders to choose from: plain decoding, and trees of the decoder's bucket.

        With "auto" there are trees of each bucket up to the decoder's.
        """
        auto = self.auto
        if self.decoder.bucket == 1:
            return (self.decoder,)
        if auto is None:
            return replace(self.decoder, bucket=1), self.decoder
        plain = replace(self.decoder, bucket=1, algorithm=auto.shape)
        buckets = tree_buckets(self.decoder.bucket, self.least_nodes)
        trees = (
            replace(self.decoder, bucket=bucket, algorithm=auto.shape, observes=buckets) for bucket in buckets
        )
        return (plain, *trees)

    @property
    def round_tokens(self) -> int:
        """Most tokens that a round commits to a slot."""
        return 1 + max(decoder.depth for decoder in self.decoders)

    def on(self, mesh: Mesh | None) -> "EnginePlan":
        """The same engine on other devices."""
        return replace(self, decoder=replace(self.decoder, mesh=mesh))

    def holding(self, requests: Sequence[Request], copies: int) -> "EnginePlan":
        """The plan of ``copies`` engines for some requests: with longer slots if these need them."""
        need = max((request.most_tokens for request in requests), default=0)
        capacity = self.size.capacity
        if need > capacity:
            capacity = default_capacity(self.decoder.target, need)
        return replace(self, size=self.size.holding(-(-len(requests) // copies), capacity))


def overlaps(plan: EnginePlan) -> bool:
    """Whether an engine overlaps single rounds: the host launches one while the device runs the one before.

    On a GPU overlapped rounds let requests come and go, and callers get tokens, with every round. Models
    whose rounds are shorter than a launch keep a loop of rounds on the device, or the device would wait for
    the host. On a CPU a round takes longer than its launch, which may even compute, so nothing would overlap.
    Several processes exchange a message per batch, which long loops make cheap.
    """
    mesh = plan.decoder.mesh
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    if platform not in ("gpu", "cuda", "rocm") or spans(mesh):
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
    and trees of the budget or none.

    Args:
        head: A draft head; None decodes plainly unless a proposer is given.
        slots: Requests that decode at the same time.
        capacity: Tokens per slot, prompt and output together; None is the default capacity.
        num_pages: Pages of all slots together; None is enough for every slot to be full.
        chunks: Shapes of prefill forwards, see `EngineSize`; None is the device's default.
        live: Numbers of live slots that may have programs, besides all; None is the device's default.
        least_nodes: Nodes of the smallest trees of "auto"; None is the device's default.
        snapshots: Number of snapshots, if the target needs any to share prefixes; None is one per slot.
        proposer: A proposer other than the head's.
        implementation: Tree attention implementation; None picks the best.
        mesh: The devices that share the models; None is one device.

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
    if chunks is None:
        chunks = chunks_for(slots, gpu=gpu)
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
