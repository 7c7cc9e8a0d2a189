"""Proposers: the sources of draft logits.

A proposer computes draft logits for the depths below the anchor, from a state that it extends whenever tokens
are committed. The draft head is a proposer; the decoder uses it only through this interface.
"""

import logging
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int

from jetspec_jax.arguments import shown
from jetspec_jax.cache.attention import attend_over
from jetspec_jax.cache.block import Block
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import chain_path, commit, empty_stores
from jetspec_jax.config import MAX_SELECTED, SCALE_BANDS, DraftHeadConfig, DraftScales, ModelConfig
from jetspec_jax.device.memory import array_bytes
from jetspec_jax.device.mesh import WHOLE
from jetspec_jax.device.partition import is_split, parameter_specs, spread
from jetspec_jax.models import DraftHead, Transformer, Weights, bind
from jetspec_jax.models.selector import parents_of
from jetspec_jax.progress import log_once
from jetspec_jax.sampling.drafting import DraftScoring
from jetspec_jax.tree import Breadth, Candidates, pair_log_probs, top_candidates
from pallas_kernels import shards
from pallas_kernels.quantized import Quantized

#: What the log says of drafts with NaN.
NAN_DRAFTS = (
    "some logits of the draft are not numbers (NaN), and drafts of such rows are not accepted; the text is "
    "the target's all the same. Check the draft head's weights, or try dtype='float32'"
)


@runtime_checkable
class Proposer(Protocol):
    """The static part of a proposer: hashable, without arrays. Its state is any pytree.

    Programs are cached by it, so two proposers that compare as equal must draft alike.
    A proposer may also have ``draft_scales``, a positive number per row: see `DraftScales`.
    """

    @property
    def depth(self) -> int:
        """D, the largest number of rows of `propose`."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `commit` needs."""
        ...

    def empty_state(self, num_pages: int, page_size: int, dtype: jnp.dtype) -> Any:
        """The state for an empty pool of pages; page numbers are those of the target's stores."""
        ...

    def prepare(self, weights: Any) -> Any:
        """The parameters in a form that rounds read faster; `propose` and `commit` accept both forms."""
        ...

    def propose(
        self,
        weights: Any,
        state: Any,
        target: Transformer,
        anchors: Int[Array, "B"],
        slots: Slots,
        depth: int | None = None,
    ) -> Float[Array, "B D V"]:
        """Draft logits: row d is the distribution of the token at depth d + 1 below the anchor.

        ``slots`` may be any selection of the batch, with their indices in ``slots.numbers``. Only the first
        ``depth`` rows are returned; None means all.
        """
        ...

    def commit(
        self,
        weights: Any,
        state: Any,
        taps: Float[Array, "B R F"],
        slots: Slots,
        count: Int[Array, "B"],
    ) -> Any:
        """The state after the first ``count[b]`` of R tapped tokens were committed to each slot.

        ``slots`` may be any selection of the batch, in its state before the commit.
        """
        ...


@runtime_checkable
class SelectingProposer(Proposer, Protocol):
    """A proposer with a selector, which scores candidates given their parents."""

    @property
    def selected(self) -> int | None:
        """The number of candidates that the selector was trained with; None without one.

        It is the least default of `select`'s ``count``, which may be up to 128.
        """
        ...

    def select(
        self,
        weights: Any,
        state: Any,
        target: Transformer,
        anchors: Int[Array, "B"],
        slots: Slots,
        count: int,
        depth: int | None,
        scoring: DraftScoring,
    ) -> Candidates:
        """The best ``count`` tokens of every row, with pairs; other arguments as for `Proposer.propose`.

        ``scoring`` scores the draft logits, and scales the selector's scores (`DraftScoring.scaled`).
        """
        ...


@runtime_checkable
class SplitProposer(Proposer, Protocol):
    """A proposer that can run on a mesh, because it defines the sharding of its arrays."""

    def spread(self, mesh: Mesh) -> Proposer:
        """The proposer whose `empty_state` has the global shapes on a mesh."""
        ...

    def weight_specs(self, mesh: Mesh) -> Any:
        """The partition specs of its parameters, for each or for whole branches."""
        ...

    def state_specs(self, state: Any, mesh: Mesh) -> Any:
        """The partition specs of its state, for each array or for whole branches."""
        ...


def check_proposer(proposer: Proposer | None, mesh: Mesh | None) -> None:
    """Checks that a proposer can run on a mesh."""
    if mesh is not None and proposer is not None and not isinstance(proposer, SplitProposer):
        raise ValueError(
            f"{type(proposer).__name__} does not say how a mesh splits it: it needs the methods of "
            "jetspec_jax.decode.proposer.SplitProposer"
        )


def split_proposer(proposer: Proposer) -> SplitProposer:
    """A proposer that `check_proposer` has accepted for a mesh, with its type."""
    assert isinstance(proposer, SplitProposer)
    return proposer


def check_given(proposer: object, weights: Any = None) -> None:
    """Checks a proposer and its parameters, which a caller gives in place of a draft head.

    Raises:
        TypeError: It is not a proposer, or not hashable.
        ValueError: There are parameters without a proposer.
    """
    if proposer is None:
        if weights is not None:
            raise ValueError("proposer_weights are the parameters of a proposer: give proposer=…, too")
        return
    kind = "an object with the methods of Proposer, or None"
    if isinstance(proposer, type):
        raise TypeError(f"proposer must be {kind}, not the class {proposer.__name__}: make an object of it")
    if not isinstance(proposer, Proposer):
        names = [name for name in vars(Proposer) if not name.startswith("_") and not hasattr(proposer, name)]
        raise TypeError(f"proposer must be {kind}, not {shown(proposer)}; it has no {', '.join(names)}")
    try:
        hash(proposer)
    except TypeError as error:
        raise TypeError(f"proposer must be hashable, as a frozen dataclass is: {error}") from error


def check_fits(proposer: Proposer | None, config: ModelConfig, copies: int) -> None:
    """Raises ValueError if a given proposer taps layers that the target has not, or the target has copies."""
    if proposer is None:
        return
    if copies > 1:
        raise ValueError("data_parallel_size must be 1 for a proposer, whose parameters are on one device")
    for tap in proposer.taps:
        if not 0 <= tap < config.num_layers:
            raise ValueError(f"taps of the proposer must lie in 0..{config.num_layers - 1}, not {tap}")


def prepared_bytes(proposer: Proposer, weights: Any) -> int:
    """Bytes by which a proposer's prepared parameters exceed the given ones."""
    given, prepared = (array_bytes(jax.eval_shape(make, weights)) for make in (lambda w: w, proposer.prepare))
    return max(prepared - given, 0)


def selected_of(proposer: Proposer | None) -> int | None:
    """The number of candidates of a proposer's selector; None without one."""
    return proposer.selected if isinstance(proposer, SelectingProposer) else None


def scales_of(
    proposer: Proposer | None, temperature: Float[Array, "B"], depth: int
) -> Float32[Array, "B D"] | None:
    """The first ``depth`` of a proposer's ``draft_scales``: b_d of `DraftScoring`; None means 1."""
    scales = getattr(proposer, "draft_scales", None)
    return None if scales is None else scales_at(jnp.asarray(scales, jnp.float32), temperature)[:, :depth]


def scales_at(scales: Float32[Array, "*bands D"], temperature: Float[Array, "B"]) -> Float32[Array, "B D"]:
    """The scales of each slot: one row for all, or of the band of its temperature."""
    if scales.ndim == 1:
        return jnp.broadcast_to(scales, (*temperature.shape, *scales.shape))
    return scales[jnp.searchsorted(jnp.array(SCALE_BANDS), temperature)]


def check_selected(proposer: Proposer | None, breadth: Breadth) -> None:
    """Raises ValueError if there are more candidates than a selector supports."""
    if selected_of(proposer) is not None and breadth.candidates > MAX_SELECTED:
        raise ValueError(
            f"candidates must be at most {MAX_SELECTED} for a draft head with a selector, which scores all "
            f"pairs of them, not {breadth.candidates}"
        )


def candidates_of(
    proposer: Proposer,
    weights: Any,
    state: Any,
    target: Transformer,
    anchors: Int[Array, "B"],
    slots: Slots,
    count: int,
    depth: int | None,
    scoring: DraftScoring,
) -> Candidates:
    """The best ``count`` tokens of every draft row, with their pairs if the proposer has a selector."""
    if isinstance(proposer, SelectingProposer) and proposer.selected is not None:
        return proposer.select(weights, state, target, anchors, slots, count, depth, scoring)
    drafts = proposer.propose(weights, state, target, anchors, slots, depth)
    shape = len(anchors), depth or proposer.depth, -(-target.config.vocab_size // shards.count())
    if jnp.shape(drafts) != shape:
        name = type(proposer).__name__
        raise ValueError(
            f"{name}.propose must give logits [B, D, V] of shape {shape}, not {jnp.shape(drafts)}"
        )
    adjusted = scoring.adjusted(drafts)
    return top_candidates(adjusted, count, scoring.perturbed(adjusted))


def warn_of_nan(drafts: Bool[np.ndarray, "*rounds B"] | None) -> None:
    """Logs a warning, once in a process, if drafts were not numbers: see `RoundRecord.nan_drafts`."""
    if drafts is not None and drafts.any():
        log_once(logging.WARNING, NAN_DRAFTS)


def taps_of(proposer: Proposer | None) -> tuple[int, ...]:
    """The layers to tap for a proposer; empty without one."""
    return () if proposer is None else proposer.taps


class PreparedHead(NamedTuple):
    """A draft head's parameters, prepared for rounds.

    ``context`` is the result of `DraftHead.context_projection`.
    """

    head: Weights
    context: Float[Array, "M L G 2 E"] | Quantized


@dataclass(frozen=True)
class DraftHeadProposer:
    """The causal parallel draft head as a proposer. Its state is the keys and values of its context.

    Attributes:
        config: The head's config.
        implementation: Implementation of tree attention; None picks the best.
    """

    config: DraftHeadConfig
    implementation: str | None = None

    @property
    def depth(self) -> int:
        """The number of draft slots after the anchor's."""
        return self.config.depth

    @property
    def taps(self) -> tuple[int, ...]:
        """The tap layers of the head's config."""
        return self.config.tap_layers

    @property
    def selected(self) -> int | None:
        """The number of candidates that the head's selector was trained with; None without one."""
        return self.config.selected

    @property
    def draft_scales(self) -> DraftScales | None:
        """The scales of the head's errors."""
        return self.config.draft_scales

    def empty_state(self, num_pages: int, page_size: int, dtype: jnp.dtype) -> Any:
        """A store per layer of the head."""
        return empty_stores(self.config.layers, num_pages, page_size, dtype)

    def spread(self, mesh: Mesh) -> "DraftHeadProposer":
        """The proposer whose state has the global shapes on a mesh."""
        return replace(self, config=spread(self.config, mesh))

    def weight_specs(self, mesh: Mesh) -> Any:
        """The partition specs of the head's parameters."""
        return parameter_specs(self.config, mesh)

    def state_specs(self, state: Any, mesh: Mesh) -> Any:
        """The partition specs of the head's stores, which are sharded like its layers."""
        return tuple(store.specs(shards.ALL) for store in state) if is_split(self.config, mesh) else WHOLE

    def prepare(self, weights: Weights | PreparedHead) -> PreparedHead:
        """The parameters, and the context's projections made contiguous."""
        if isinstance(weights, PreparedHead):
            return weights
        return PreparedHead(weights, bind(self.config, weights).context_projection())

    def propose(
        self,
        weights: Weights | PreparedHead,
        state: Any,
        target: Transformer,
        anchors: Int[Array, "B"],
        slots: Slots,
        depth: int | None = None,
    ) -> Float[Array, "B D V"]:
        """One forward of the head over ``[anchor, MASK, MASK, ...]``, whose rows are not stored."""
        hidden = self._hidden(weights, state, target, anchors, slots, depth)
        return target.logits(hidden, capped=self.config.capped_logits)

    def select(
        self,
        weights: Weights | PreparedHead,
        state: Any,
        target: Transformer,
        anchors: Int[Array, "B"],
        slots: Slots,
        count: int,
        depth: int | None,
        scoring: DraftScoring,
    ) -> Candidates:
        """As `propose`, plus the selector's scores of all pairs of candidates."""
        selector = self.config.selector
        assert selector is not None, "a head without a selector"
        hidden = self._hidden(weights, state, target, anchors, slots, depth)
        adjusted = scoring.adjusted(target.logits(hidden, capped=self.config.capped_logits))
        drafted = top_candidates(adjusted, count, scoring.perturbed(adjusted))
        parents = parents_of(anchors, drafted.tokens)
        scores = self._bound(weights).selector(hidden, parents, drafted.tokens)
        assert drafted.draft_log_probs is not None
        return replace(
            drafted,
            pairs=pair_log_probs(drafted.log_probs, scoring.scaled(scores), tail=selector.tail),
            draft_pairs=pair_log_probs(drafted.draft_log_probs, scores, tail=selector.tail),
        )

    def _bound(self, weights: Weights | PreparedHead) -> DraftHead:
        return bind(self.config, weights.head if isinstance(weights, PreparedHead) else weights)

    def _hidden(
        self,
        weights: Weights | PreparedHead,
        state: Any,
        target: Transformer,
        anchors: Int[Array, "B"],
        slots: Slots,
        depth: int | None,
    ) -> Float[Array, "B D M"]:
        """Final-normed hidden states of the draft rows."""
        num_rows = self.depth if depth is None else depth
        # The rows of a causal head do not depend on later rows; in other heads all rows are needed.
        rows = num_rows if self.config.causal else self.depth
        masks = jnp.full((anchors.shape[0], rows), self.config.mask_token_id, anchors.dtype)
        tokens = jnp.concatenate([anchors[:, None], masks], axis=1)
        block = Block.chain(tokens, "chain" if self.config.causal else "full")
        attend = attend_over(state, slots, block, implementation=self.implementation)
        head = self._bound(weights)
        slots_in = target.embed(block.tokens, scaled=self.config.scaled_embeddings)
        hidden = head(slots_in, block.positions(slots.lengths), attend)
        # The anchor's slot drafts nothing.
        return hidden[:, 1 : 1 + num_rows]

    def commit(
        self,
        weights: Weights | PreparedHead,
        state: Any,
        taps: Float[Array, "B R F"],
        slots: Slots,
        count: Int[Array, "B"],
    ) -> Any:
        """Projects the tapped tokens to every layer's context, and stores the result."""
        positions = slots.lengths[:, None] + jnp.arange(taps.shape[1], dtype=jnp.int32)[None, :]
        weights = self.prepare(weights)
        if shards.count() > 1:
            # Orders the gather in `context` after that of the choices, on which `count` depends: see
            # `shards`. Rows beyond the count are not stored.
            taken = jnp.arange(taps.shape[1])[None, :] < count[:, None]
            taps = jnp.where(taken[:, :, None], taps, 0)
        context = bind(self.config, weights.head).context(taps, positions, weights.context)
        return commit(state, slots, context, chain_path(*taps.shape[:2]), count)
