"""What an engine is, and whether one serves what another was planned for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.config import DraftHeadConfig, ModelConfig
from jetspec_jax.decode.decoder import TreeDecoder
from jetspec_jax.decode.proposer import Proposer
from jetspec_jax.decode.settings import TreeSettings, make_decoder
from jetspec_jax.engine.budget_policy import MAX_ROUNDS
from jetspec_jax.engine.extras import NO_EXTRAS, Extras
from jetspec_jax.engine.known_costs import CostKey
from jetspec_jax.engine.pace import Slices
from jetspec_jax.engine.size import (
    MOST_ROWS,
    PREFILL_TOKENS,
    EngineSize,
    chunks_for,
    powers,
)
from jetspec_jax.tree import BUCKETS, USUAL_LEAST, Auto, algorithm_of, tree_buckets
from pallas_kernels.dispatch import gpu_problem


@dataclass(frozen=True)
class EnginePlan:
    """All that an engine is, but for its weights.

    Attributes:
        decoder: Of the largest trees that it may build.
        size: How much it holds.
        dtype: Of the weights, and so of the stores.
        least_nodes: Of the smallest trees that "auto" may choose: the more slots decode, the smaller are
            those that pay.
        slices: How long dispatches are; None suits calls that nobody joins.
        extras: What its requests may want beside.
        led: Whether of several processes the first decides all, and the others follow it.
    """

    decoder: TreeDecoder
    size: EngineSize
    dtype: jnp.dtype
    least_nodes: int = USUAL_LEAST
    slices: Slices | None = None
    extras: Extras = NO_EXTRAS
    led: bool = False

    @property
    def auto(self) -> Auto | None:
        """The algorithm, where it chooses among the buckets up to the decoder's."""
        algorithm = algorithm_of(self.decoder.algorithm)
        return algorithm if isinstance(algorithm, Auto) and self.decoder.bucket > 1 else None

    @property
    def decoders(self) -> tuple[TreeDecoder, ...]:
        """Those that the engine chooses from: with "auto" one for each bucket up to the decoder's.

        One that stands has always plain decoding among them: a request may ask for no trees.
        """
        auto = self.auto
        if auto is None:
            plain = (replace(self.decoder, bucket=1),) if self.stands and self.decoder.bucket > 1 else ()
            return (*plain, self.decoder)
        plain = replace(self.decoder, bucket=1, algorithm=auto.shape)
        buckets = tree_buckets(self.decoder.bucket, self.least_nodes)
        trees = (
            replace(self.decoder, bucket=bucket, algorithm=auto.shape, observes=buckets) for bucket in buckets
        )
        return (plain, *trees)

    @property
    def cost_key(self) -> CostKey:
        """What decides how long its rounds take."""
        return self.decoders, self.size, self.dtype

    def on(self, mesh: Mesh | None) -> "EnginePlan":
        """The same engine on other devices."""
        if mesh == self.decoder.mesh:
            return self
        return replace(self, decoder=replace(self.decoder, mesh=mesh))

    def for_many(
        self,
        *,
        live: Sequence[int] | None = None,
        prefill_tokens: int | None = PREFILL_TOKENS,
        most_rows: int | None = MOST_ROWS,
        least_nodes: int = BUCKETS[1],
        slices: Slices | None = None,
        snapshots: int | None = None,
    ) -> "EnginePlan":
        """The same engine for requests that come and go at any time, of which many decode together.

        Args:
            live: Numbers of live slots that have programs, beside all; None is 1, 2, 4, ….
            prefill_tokens: Prompt tokens between two dispatches, at most; None is no bound.
            most_rows: Nodes of all live slots together, at most, of trees that are chosen; None is no bound.
            least_nodes: Of the smallest trees that "auto" may choose.
            slices: How long dispatches are; None is as `Slices` says.
            snapshots: Places for what slots keep beside pages, where the target has windows or recurrent
                layers: without any, requests to it share no beginnings. None is as many as slots.
        """
        own = powers(self.size.slots) if live is None else tuple(sorted(live))
        # Where there is nothing to choose, all slots together have the trees of one.
        most_rows = None if self.auto is None else most_rows
        size = replace(self.size, live=own, prefill_tokens=prefill_tokens, most_rows=most_rows)
        size = size.with_snapshots(snapshots)
        return replace(self, size=size, least_nodes=least_nodes, slices=slices or Slices())

    @property
    def stands(self) -> bool:
        """Whether its engine stays for requests that come and go, whatever their number."""
        return self.slices is not None

    def serves(self, other: "EnginePlan", *, joining: bool = False) -> bool:
        """Whether an engine of this plan does what one of the other would do; one that stands, any less.

        Args:
            other: What is needed.
            joining: Whether requests join those that run, and may wait for them: for fewer slots than were
                asked for where the engine stands, and for as many else.
        """
        mine, wanted = self.size, other.size
        if other.stands or not (self.stands or joining):
            kept, asked = (
                (own.size.slots, own.size.chunks, own.size.snapshots, own.least_nodes, own.slices)
                for own in (self, other)
            )
            enough = kept == asked
        else:
            enough = mine.slots >= wanted.slots or (joining and self.stands)
        return (
            enough
            and self.has_trees_of(other)
            and (self.dtype, self.led) == (other.dtype, other.led)
            and mine.capacity >= wanted.capacity
            and (joining or mine.num_pages >= wanted.num_pages)
        )

    def has_trees_of(self, other: "EnginePlan") -> bool:
        """Whether the decoders are equal; one that stands may choose among sizes of the other's trees."""
        mine, wanted = self.decoder, other.decoder
        if self.stands and not other.stands:
            mine, wanted = _as_shaped(mine), _as_shaped(wanted)
        return mine == wanted


def _as_shaped(decoder: TreeDecoder) -> TreeDecoder:
    """A decoder of trees as they are shaped, whoever chooses their size."""
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
    proposer: Proposer | None = None,
    implementation: str | None = None,
    mesh: Mesh | None = None,
) -> EnginePlan:
    """An engine for some trees.

    Args:
        target: The target.
        head: A draft head; None decodes plainly unless a proposer is given.
        settings: The trees.
        dtype: Of the weights.
        slots: Requests that decode at the same time.
        capacity: Tokens that a slot can hold, prompt and output together; None is the usual number.
        num_pages: Pages of all slots together; None is enough for every slot to be full.
        chunks: Shapes of the forwards of prompts, see `EngineSize`; None is the usual ones of the device.
        proposer: A proposer other than the head's.
        implementation: Of tree attention; None picks the best.
        mesh: The devices that share the models; None is one.

    Raises:
        ValueError: The head does not fit, a setting is out of its range, or the mesh cannot split a model.
    """
    decoder = make_decoder(
        target, head, settings, proposer=proposer, implementation=implementation, mesh=mesh
    )
    decoder = replace(decoder, max_rounds=MAX_ROUNDS)
    if chunks is None:
        # Plain XLA makes the scores of all rows at once.
        chunks = chunks_for(slots, gpu=implementation != "xla" and gpu_problem() is None)
    return EnginePlan(decoder, EngineSize.of(target, slots, capacity, num_pages, chunks), dtype)
