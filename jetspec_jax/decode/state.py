"""All arrays of decoding, and how a slot changes hands. No shape here depends on the bucket of the trees.

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


class DecodeWeights(NamedTuple):
    """The parameters that a round reads.

    Attributes:
        target: The target's.
        proposer: The proposer's; None in plain decoding.
    """

    target: Weights
    proposer: Any = None


class SlotSettings(NamedTuple):
    """What a request brings to its slot; in `DecodeState` every field has a leading slot axis.

    Attributes:
        sampling: How its tokens are chosen.
        budget: Most nodes of its trees, root included.
        depth: Largest depth of its trees.
        remaining: Tokens that it may still emit.
        stop_bits: Packed set of the tokens that end it.
        routing: What is known of it, for tree algorithms that look at that.
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
        """One request's settings as NumPy values, without the slot axis; draws a seed if there is none.

        Args:
            params: The request's sampling parameters.
            stop_ids: All tokens that end it; whether end-of-sequence tokens do is the caller's say.
            vocab_size: V.
            budget: Most nodes of its trees.
            depth: Largest depth of its trees.
            routing: What is known of the request.

        Raises:
            ValueError: There is no number of tokens, or the routing has unknown keys.
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
    """Every array of B slots. Nothing here depends on the bucket, so it can change between rounds.

    Attributes:
        stores: The target's committed tokens, one store per layer.
        proposer: The proposer's state; None in plain decoding.
        slots: Where each slot's tokens lie in the stores, and how many they are.
        room: How many tokens each slot's pages hold.
        anchors: The last token of each slot, not yet in the stores: the root of its next tree.
        active: Slots that decode; others are free, being prefilled, or finished.
        settings: What the slots' requests asked for.
        page_size: Tokens of a page.
        adjust: What they want of the logits; None where no request may want anything.
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
    """What a round did; `TreeDecoder.decode` stacks records along a leading axis of rounds.

    Attributes:
        tokens: Committed tokens of each slot (the accepted ones, then the bonus), -1 beyond.
        tree_sizes: Nodes of each slot's tree; 0 for a slot that did not decode.
        reach: What trees of each smaller bucket would have had accepted, 0 for a slot that did not decode;
            None where the decoder does not observe it.
        logprobs: Of the committed tokens; None where the decoder does not tell them.
    """

    tokens: Int32[Array, "*rounds B D1"]
    tree_sizes: Int32[Array, "*rounds B"]
    reach: Reach | None = None
    logprobs: Logprobs | None = None

    @property
    def counts(self) -> Int32[Array, "*rounds B"]:
        """How many tokens: accepted drafted ones plus one; 0 for a slot that did not decode."""
        return (self.tokens >= 0).sum(axis=-1, dtype=np.int32)


#: The part of a state that holds tokens: the target's stores, and the proposer's state.
Stores = tuple[Any, Any]


def split(state: DecodeState) -> tuple[Stores, DecodeState]:
    """A state's stores, and the state without them: fewer arrays for programs that look at none."""
    return (state.stores, state.proposer), replace(state, stores=(), proposer=None)


def join(stores: Stores, state: DecodeState) -> DecodeState:
    """The inverse of `split`."""
    return replace(state, stores=stores[0], proposer=stores[1])


def pick(state: DecodeState, numbers: Int[Array, "L"]) -> DecodeState:
    """Some slots, each once and in any order, as a state of their own; what has pages stays whole."""
    small = state.slots, state.room, state.anchors, state.active, state.settings
    slots, room, anchors, active, settings = jax.tree.map(lambda all_: all_[numbers], small)
    return replace(
        state,
        stores=tuple(store.pick(numbers) for store in state.stores),
        slots=slots,
        room=room,
        anchors=anchors,
        active=active,
        settings=settings,
        adjust=jax.tree.map(lambda all_: all_[numbers], state.adjust),
    )


def put(state: DecodeState, numbers: Int[Array, "L"], picked: DecodeState) -> DecodeState:
    """The inverse of `pick`: the state after what was committed to the slots that were picked of it.

    Only what commits change is put back, not where a slot's pages are, nor what its request asked for.
    """

    def back(all_: Array, own: Array) -> Array:
        return all_.at[numbers].set(own, unique_indices=True)

    stores = zip(state.stores, picked.stores, strict=True)
    remaining = back(state.settings.remaining, picked.settings.remaining)
    adjust = state.adjust
    if adjust is not None and picked.adjust is not None:
        adjust = adjust._replace(history=jax.tree.map(back, adjust.history, picked.adjust.history))
    return replace(
        state,
        stores=tuple(store.put(numbers, own) for store, own in stores),
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
    """Hands a slot to a request, whatever it held; the other slots keep their state. ``state`` is donated.

    Args:
        state: The state.
        slot: Which slot.
        pages: The request's pages, padded with `NO_PAGE`.
        settings: The request's settings, without the slot axis.
        anchor: The last token of its prompt: the root of its first tree. Those before it are prefilled.
        length: Tokens that its pages hold already, of target and proposer alike.
        active: Whether it decodes from now on: no token is left to prefill.
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
        settings=jax.tree.map(lambda all_, own: all_.at[slot].set(own), state.settings, settings),
    )


@functools.partial(jax.jit, donate_argnums=0)
def put_adjustments(all_: Adjustments, slot: Int[Array, ""], own: Adjustments) -> Adjustments:
    """What a slot's request wants of the logits, in its place. ``all_`` is donated."""
    return jax.tree.map(lambda of_all, of_one: of_all.at[slot].set(of_one), all_, own)


@functools.partial(jax.jit, donate_argnums=0)
def forget_adjustments(all_: Adjustments, slot: Int[Array, ""]) -> Adjustments:
    """The same, but that a slot's request wants nothing. ``all_`` is donated."""
    return all_._replace(active=all_.active.at[slot].set(False))


@functools.partial(jax.jit, donate_argnums=0)
def grow(state: DecodeState, slots: Int[Array, "L"], pages: Int[Array, "L T"]) -> DecodeState:
    """Gives slots more pages; those that paused for want of them go on. ``state`` is donated.

    Args:
        state: The state.
        slots: Which, each once; a number that is no slot's is nobody.
        pages: The whole block table of each: pages that a slot had stay where they are in it.
    """
    tables = state.slots.block_tables.at[slots].set(pages, mode="drop")
    room = state.room.at[slots].set(_tokens_in(pages, state.page_size), mode="drop")
    return replace(state, slots=state.slots._replace(block_tables=tables), room=room)


def _tokens_in(pages: Int[Array, "*L T"], page_size: int) -> Int32[Array, "*L"]:
    """How many tokens block tables have room for."""
    return page_size * jnp.sum(pages != NO_PAGE, axis=-1, dtype=jnp.int32)


@functools.partial(jax.jit, donate_argnums=0)
def release(state: DecodeState, slot: Int[Array, ""]) -> DecodeState:
    """Frees a slot: it no longer decodes and no longer names a page. ``state`` is donated."""
    return replace(
        state,
        slots=state.slots._replace(
            block_tables=state.slots.block_tables.at[slot].set(NO_PAGE),
            lengths=state.slots.lengths.at[slot].set(0),
        ),
        room=state.room.at[slot].set(0),
        active=state.active.at[slot].set(False),
        # A greedy slot: what it sampled by must not keep the batch from its greedy path.
        settings=state.settings._replace(
            sampling=state.settings.sampling._replace(
                temperature=state.settings.sampling.temperature.at[slot].set(0.0)
            )
        ),
    )
