"""Plans of engines, and whether an existing engine can serve a plan."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from jetspec_jax.engine.extras import NO_EXTRAS, Extras
from jetspec_jax.engine.policy import MAX_ROUNDS
from jetspec_jax.engine.request import Request
from jetspec_jax.engine.size import (
    MAX_SLOTS,
    MOST_ROWS,
    PREFILL_TOKENS,
    EngineSize,
    chunks_for,
    default_capacity,
    powers,
)
from jetspec_jax.tree import BUCKETS, USUAL_LEAST, Auto, algorithm_of, tree_buckets
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
        least_nodes: Nodes of the smallest trees that "auto" may choose: the more slots decode, the smaller
            are the trees that pay.
        persistent: Whether its engine stays for requests that arrive at any time.
        extras: Optional features that have device memory.
    """

    decoder: TreeDecoder
    size: EngineSize
    dtype: jnp.dtype
    least_nodes: int = USUAL_LEAST
    persistent: bool = False
    extras: Extras = NO_EXTRAS

    @property
    def auto(self) -> Auto | None:
        """The algorithm, if it chooses among the buckets up to the decoder's."""
        algorithm = algorithm_of(self.decoder.algorithm)
        return algorithm if isinstance(algorithm, Auto) and self.decoder.bucket > 1 else None

    @property
    def decoders(self) -> tuple[TreeDecoder, ...]:
        """The decoders to choose from: with "auto" one for each bucket up to the decoder's.

        A persistent engine always has plain decoding: a request may have a budget of 1.
        """
        auto = self.auto
        if auto is None:
            plain = (replace(self.decoder, bucket=1),) if self.persistent and self.decoder.bucket > 1 else ()
            return (*plain, self.decoder)
        plain = replace(self.decoder, bucket=1, algorithm=auto.shape)
        buckets = tree_buckets(self.decoder.bucket, self.least_nodes)
        trees = (
            replace(self.decoder, bucket=bucket, algorithm=auto.shape, observes=buckets) for bucket in buckets
        )
        return (plain, *trees)

    def on(self, mesh: Mesh | None) -> "EnginePlan":
        """The same engine on other devices."""
        if mesh == self.decoder.mesh:
            return self
        return replace(self, decoder=replace(self.decoder, mesh=mesh))

    def for_requests(self, requests: Sequence[Request], copies: int = 1) -> "EnginePlan":
        """A plan with which ``copies`` engines can serve these requests.

        It has a longer capacity if they need it, and the features they use.
        """
        size, need = self.size, max((request.most_tokens for request in requests), default=0)
        if need > size.capacity:
            size = size.holding(-(-len(requests) // copies), default_capacity(self.decoder.target, need))
        return replace(self, size=size, extras=Extras.of(requests))

    def for_many(
        self,
        *,
        live: Sequence[int] | None = None,
        prefill_tokens: int | None = PREFILL_TOKENS,
        most_rows: int | None = MOST_ROWS,
        least_nodes: int = BUCKETS[1],
        snapshots: int | None = None,
    ) -> "EnginePlan":
        """A persistent engine: for requests that arrive at any time, many of which decode together.

        The arguments are those of the plan and of its `EngineSize`. By default there are programs for 1, 2,
        4, … live slots, and as many snapshots as slots, if the target needs any to share prefixes.
        """
        live = powers(self.size.slots) if live is None else tuple(sorted(live))
        # A fixed budget holds for any number of slots.
        most_rows = None if self.auto is None else most_rows
        size = replace(self.size, live=live, prefill_tokens=prefill_tokens, most_rows=most_rows)
        size = size.with_snapshots(snapshots)
        return replace(self, size=size, least_nodes=least_nodes, persistent=True)

    def serves(self, other: "EnginePlan", count: int, *, joining: bool = False) -> bool:
        """Whether an engine of this plan can serve requests that were planned with another plan.

        Args:
            other: The required plan.
            count: Number of requests that decode together.
            joining: Whether the requests join running ones. They may then wait: for slots of a persistent
                engine, which may have fewer than required, and for pages of any engine.
        """
        if other.persistent:
            return replace(self, extras=other.extras) == other
        size, required = self.size, other.size
        return (
            (size.slots >= count or (joining and self.persistent))
            and self.has_trees_of(other)
            and self.dtype == other.dtype
            and size.capacity >= required.capacity
            and (joining or size.num_pages >= required.pages_of(count))
        )

    def has_trees_of(self, other: "EnginePlan") -> bool:
        """Whether the decoders are equal; a persistent engine may choose among sizes of the other's trees."""
        decoder, required = self.decoder, other.decoder
        if self.persistent and not other.persistent:
            decoder, required = _as_shaped(decoder), _as_shaped(required)
        return decoder == required


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


def _as_shaped(decoder: TreeDecoder) -> TreeDecoder:
    """The decoder with the tree-shaping algorithm of "auto"."""
    algorithm = algorithm_of(decoder.algorithm)
    return replace(decoder, algorithm=algorithm.shape if isinstance(algorithm, Auto) else algorithm)


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
    live: Sequence[int] = (),
    proposer: Proposer | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> EnginePlan:
    """Plans an engine for tree settings, with stores of the weights' dtype.

    Args:
        head: A draft head; None decodes plainly unless a proposer is given.
        slots: Requests that decode at the same time.
        capacity: Tokens per slot, prompt and output together; None is the default capacity.
        num_pages: Pages of all slots together; None is enough for every slot to be full.
        chunks: Shapes of prefill forwards, see `EngineSize`; None is the device's default.
        live: Numbers of live slots that may have programs, besides all: see `EngineSize`.
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
    if chunks is None:
        # Plain XLA computes the scores of all rows at once.
        chunks = chunks_for(slots, gpu=implementation != "xla" and gpu_problem() is None)
    size = replace(EngineSize.of(target, slots, capacity, num_pages, chunks), live=tuple(live))
    return EnginePlan(decoder, size, dtype)


def plan_calls(
    target: ModelConfig,
    head: DraftHeadConfig | None,
    settings: TreeSettings,
    dtype: jnp.dtype,
    *,
    max_slots: int = MAX_SLOTS,
    **options: Any,
) -> EnginePlan:
    """As `plan_engine`, for calls of 1 to ``max_slots`` prompts: programs are compiled when calls need them.

    Raises:
        TypeError: ``max_slots`` is not an integer.
        ValueError: It is less than 1, or as `plan_engine`.
    """
    live = powers(check_integer("max_slots", max_slots, 1))
    return plan_engine(target, head, settings, dtype, slots=max_slots, live=live, **options)
