"""All arrays of decoding, and the assignment of slots. No shape here depends on the bucket of the trees.

Shapes: B slots, L slots of a selection, D draft depth, P pages, T pages per slot.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, UInt32

from jetspec_jax.cache.pages import NO_PAGE
from jetspec_jax.cache.slots import Slots
from jetspec_jax.cache.stores import Store
from jetspec_jax.decode.logprobs import Logprobs
from jetspec_jax.models import Weights
from jetspec_jax.sampling.adjust import Adjustments
from jetspec_jax.sampling.params import SamplingParams
from jetspec_jax.sampling.slots import Sampling
from jetspec_jax.sampling.token_sets import packed
from jetspec_jax.tree import Hints, Reach, Routing
from pallas_kernels.peer_sum import Exchange


class DecodeWeights(NamedTuple):
    """The parameters that a round reads.

    Attributes:
        target: The target's parameters.
        proposer: The proposer's parameters; None in plain decoding.
        exchange: Memory for the sums of devices that share the models, see `pallas_kernels.peer_sum`; None
            leaves these sums to XLA.
    """

    target: Weights
    proposer: Any = None
    exchange: Exchange | None = None


class SlotSettings(NamedTuple):
    """The settings of a slot's request; in `DecodeState` every field has a leading slot axis.

    Attributes:
        sampling: Sampling settings.
        budget: Most nodes of the trees, root included.
        depth: Largest depth of the trees.
        remaining: Number of tokens that may still be emitted.
        stop_bits: Packed set of the tokens that end the request.
        routing: Routing hints for tree algorithms.
    """

    sampling: Sampling
    budget: Int[Array, "B"]
    depth: Int[Array, "B"]
    remaining: Int[Array, "B"]
    stop_bits: UInt32[Array, "B words"]
    routing: Routing

    @classmethod
    def of(
        cls,
        params: SamplingParams,
        stop_ids: Collection[int],
        *,
        vocab_size: int,
        budget: int = 1,
        depth: int = 0,
        routing: Hints | None = None,
    ) -> "SlotSettings":
        """One request's settings as NumPy values without the slot axis; draws a seed if it is None.

        Args:
            params: The request's sampling parameters.
            stop_ids: All tokens that end the request, including end-of-sequence tokens if they do.
            vocab_size: V.
            budget: Most nodes of the trees.
            depth: Largest depth of the trees.
            routing: Routing hints.

        Raises:
            ValueError: ``max_tokens`` is None, or the routing has unknown keys.
        """
        if params.max_tokens is None:
            raise ValueError("max_tokens must be a number here: a slot does not know where the context ends")
        stops = packed(stop_ids, vocab_size)
        counts: Any = (np.int32(budget), np.int32(depth), np.int32(params.max_tokens), stops)
        hints: Any = Routing.of_one(routing)
        return cls(Sampling.of(params), *counts, routing=hints)


# Unchecked by the tests' typing hook: JAX rebuilds pytrees around leaves of any kind.
@no_type_check
@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeState:
    """All arrays of B slots. Nothing here depends on the bucket, so it can change between rounds.

    Attributes:
        stores: The target's committed tokens, one store per layer.
        proposer: The proposer's state; None in plain decoding.
        slots: Block tables and lengths of the slots.
        room: Number of tokens that each slot's pages hold.
        anchors: The last token of each slot, which is not in the stores yet: the root of its next tree.
        active: Slots that decode; others are free, being prefilled, or finished.
        settings: The settings of the slots' requests.
        page_size: Tokens of a page.
        adjust: Logit adjustments of the slots; None if the decoder has none.
    """

    stores: tuple[Store, ...]
    proposer: Any
    slots: Slots
    room: Int32[Array, "B"]
    anchors: Int32[Array, "B"]
    active: Bool[Array, "B"]
    settings: SlotSettings
    page_size: int = field(metadata={"static": True})
    adjust: Adjustments | None = None


class RoundRecord(NamedTuple):
    """The record of a round; `TreeDecoder.decode` stacks records along a leading axis of rounds.

    Attributes:
        tokens: Committed tokens of each slot (the accepted ones, then the bonus), -1 beyond.
        tree_sizes: Nodes of each slot's tree; 0 for a slot that did not decode.
        tree_depths: Depth of each tree's deepest node; 0 for a slot that did not decode.
        reach: The acceptance that trees of smaller sizes would have had, 0 for a slot that did not decode;
            None if the decoder does not observe it.
        logprobs: Log-probabilities of the committed tokens; None if the decoder does not compute them.
        nan_drafts: Whether a slot that decoded has draft rows that are not numbers; None if not known, as
            without a tree, and in rounds in three programs, whose last part does not get the drafts.
    """

    tokens: Int32[Array, "*rounds B D1"]
    tree_sizes: Int32[Array, "*rounds B"]
    tree_depths: Int32[Array, "*rounds B"]
    reach: Reach | None = None
    logprobs: Logprobs | None = None
    nan_drafts: Bool[Array, "*rounds B"] | None = None

    @property
    def counts(self) -> Int32[Array, "*rounds B"]:
        """Number of committed tokens: accepted drafted ones plus one; 0 for a slot that did not decode."""
        return (self.tokens >= 0).sum(axis=-1, dtype=np.int32)


#: The part of a state that holds tokens: the target's stores, and the proposer's state.
Stores = tuple[Any, Any]


def split(state: DecodeState) -> tuple[Stores, DecodeState]:
    """A state's stores, and the state without them, for programs that do not need the stores."""
    return (state.stores, state.proposer), replace(state, stores=(), proposer=None)


def join(stores: Stores, state: DecodeState) -> DecodeState:
    """The inverse of `split`."""
    return replace(state, stores=stores[0], proposer=stores[1])


def pick(state: DecodeState, numbers: Int[Array, "L"]) -> DecodeState:
    """A state with only some slots, unique and in any order; stores with pages stay whole."""
    small = state.slots, state.room, state.anchors, state.active, state.settings
    slots, room, anchors, active, settings = jax.tree.map(lambda array: array[numbers], small)
    return replace(
        state,
        stores=tuple(store.pick(numbers) for store in state.stores),
        slots=slots,
        room=room,
        anchors=anchors,
        active=active,
        settings=settings,
        adjust=jax.tree.map(lambda array: array[numbers], state.adjust),
    )


def put(state: DecodeState, numbers: Int[Array, "L"], picked: DecodeState) -> DecodeState:
    """The inverse of `pick`: writes the picked slots back after commits.

    Only arrays that commits change are written, not block tables and requests' settings.
    """

    def back(array: Array, part: Array) -> Array:
        return array.at[numbers].set(part, unique_indices=True)

    stores = zip(state.stores, picked.stores, strict=True)
    remaining = back(state.settings.remaining, picked.settings.remaining)
    adjust = state.adjust
    if adjust is not None and picked.adjust is not None:
        adjust = adjust._replace(history=jax.tree.map(back, adjust.history, picked.adjust.history))
    return replace(
        state,
        stores=tuple(store.put(numbers, part) for store, part in stores),
        proposer=picked.proposer,
        slots=state.slots._replace(lengths=back(state.slots.lengths, picked.slots.lengths)),
        anchors=back(state.anchors, picked.anchors),
        active=back(state.active, picked.active),
        settings=state.settings._replace(remaining=remaining),
        adjust=adjust,
    )


@functools.partial(jax.jit, donate_argnums=0)
def insert(
    state: DecodeState,
    slot: Int[Array, ""],
    pages: Int[Array, "T"],
    settings: SlotSettings,
    anchor: Int[Array, ""],
    length: Int[Array, ""],
    active: Bool[Array, ""],
) -> DecodeState:
    """Assigns a slot to a request; other slots keep their state. ``state`` is donated.

    The slot's previous content does not matter. Pages are padded with `NO_PAGE`, and hold ``length`` tokens
    already, for target and proposer. The anchor is the last token of the prompt; the slot is ``active`` if no
    earlier one is left to prefill.
    """
    return replace(
        state,
        slots=state.slots._replace(
            block_tables=state.slots.block_tables.at[slot].set(pages),
            lengths=state.slots.lengths.at[slot].set(length),
        ),
        room=state.room.at[slot].set(_tokens_in(pages, state.page_size)),
        anchors=state.anchors.at[slot].set(anchor),
        active=state.active.at[slot].set(active),
        settings=jax.tree.map(lambda array, value: array.at[slot].set(value), state.settings, settings),
    )


@functools.partial(jax.jit, donate_argnums=0)
def put_adjustments(adjustments: Adjustments, slot: Int[Array, ""], request: Adjustments) -> Adjustments:
    """Sets the adjustments of a slot's request. ``adjustments`` is donated."""
    return jax.tree.map(lambda of_all, of_one: of_all.at[slot].set(of_one), adjustments, request)


@functools.partial(jax.jit, donate_argnums=0)
def forget_adjustments(adjustments: Adjustments, slot: Int[Array, ""]) -> Adjustments:
    """Removes the adjustments of a slot. ``adjustments`` is donated."""
    return adjustments._replace(active=adjustments.active.at[slot].set(False))


@functools.partial(jax.jit, donate_argnums=0)
def grow(state: DecodeState, slots: Int[Array, "L"], pages: Int[Array, "L T"]) -> DecodeState:
    """Adds pages to slots; slots that paused for lack of pages resume. ``state`` is donated.

    ``pages`` are whole new block tables, in which existing pages keep their positions. Numbers that are not
    slots are ignored.
    """
    tables = state.slots.block_tables.at[slots].set(pages, mode="drop")
    room = state.room.at[slots].set(_tokens_in(pages, state.page_size), mode="drop")
    return replace(state, slots=state.slots._replace(block_tables=tables), room=room)


def _tokens_in(pages: Int[Array, "*L T"], page_size: int) -> Int32[Array, "*L"]:
    """Number of tokens that the pages of block tables hold."""
    return page_size * jnp.sum(pages != NO_PAGE, axis=-1, dtype=jnp.int32)


@functools.partial(jax.jit, donate_argnums=0)
def release(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Frees a slot: it no longer decodes and has no pages. ``state`` is donated."""
    return replace(
        state,
        slots=state.slots._replace(
            block_tables=state.slots.block_tables.at[slot].set(NO_PAGE),
            lengths=state.slots.lengths.at[slot].set(0),
        ),
        room=state.room.at[slot].set(0),
        active=state.active.at[slot].set(False),
        # Greedy, so that a free slot does not keep the batch from the greedy path.
        settings=state.settings._replace(
            sampling=state.settings.sampling._replace(
                temperature=state.settings.sampling.temperature.at[slot].set(0.0)
            )
        ),
    )
